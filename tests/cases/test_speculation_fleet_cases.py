"""What clients get from a whole fleet, whatever its drafter is worth: what the model alone says, to the last token.

A tiny model in float32. The truth is made by a decode worker's pure parts without drafts; then all requests run at once
through a fleet without a drafter, with a good one, with one that is always wrong, and with one that draws lots. A draft
head is good for a model whose next token depends on the last alone; its truth is made in the same way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.decode.service import DecodeWorker
from services.drafter.sources.head import HeadSource
from shared.engine.base import StepEngine
from shared.engine.draft_head import DraftHead
from shared.engine.engine import Engine
from tests import draft_release, tiny_models
from tests.draft_engines import Fallible, Guessing
from tests.fleet_rig import FleetRig
from tests.one_worker import Answer, OneWorker
from trine.completion import Completion

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

K = 4
EAGER: dict[str, Any] = {"draft_depth": K, "draft_wait_ms": 5000, "draft_adaptive": False}
EOS = 2
BANNED = 9
CONTEXT = 256
TEMPERATURES = (0, 1.2)
LENGTH = 16
WORD = 11
"""Where the answer to `FREE` ends by itself, with these `SEEDS`."""
SEEDS = {"engine": 15, "knower": 105}
PLACES = range(K + 2)
"""Of the first token, and of those of the first block of drafts with the token after them."""


def prompt(length: int, seed: int = 5) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, tiny_models.VOCAB) for _ in range(length)]


def text(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tiny_models.write(tmp_path_factory.mktemp("llama"), tiny_models.ARCHITECTURES["llama"])
    return Engine.load(folder, block_size=4, kv_blocks=1200)


@pytest.fixture(scope="module")
def knower(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, DraftHead]:
    """A model whose next token depends on the last alone, and the draft head that knows how."""
    target, release = (tmp_path_factory.mktemp(name) for name in ("target", "release"))
    draft_release.write_perfect(target, release, vocab=tiny_models.VOCAB, context=CONTEXT)
    return Engine.load(target, block_size=4, kv_blocks=1200), DraftHead.load(release, target)


# Requests, named by the case that they are about

FREE: dict[str, Any] = {"token_ids": prompt(11), "temperature": 1.0, "seed": SEEDS["engine"], "max_tokens": LENGTH}
ENDLESS = {**FREE, "logit_bias": {EOS: -100}}
STEERED: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1},
    "presence": {"presence_penalty": 1},
    "repetition": {"repetition_penalty": 1.2},
    "bias": {"logit_bias": {EOS: -100, BANNED: -100, 5: 2}},
}


def requests(free: Sequence[int], endless: Sequence[int]) -> dict[str, dict[str, Any]]:
    """`free` and `endless`: what the model says to those, the first beyond its end."""
    out: dict[str, dict[str, Any]] = {}
    for temperature in TEMPERATURES:
        how = {**ENDLESS, "temperature": temperature}
        out[f"35 at {temperature}"] = {**how, "max_tokens": 2 * LENGTH}
        out[f"41 at {temperature}"] = {**how, "logprobs": True, "top_logprobs": 5}
        out |= {f"44 {name} at {temperature}": {**how, **steering} for name, steering in STEERED.items()}
    out |= {f"36 {place}": {**FREE, "token_ids": [*FREE["token_ids"], *free[: WORD - place]]} for place in PLACES}
    for place in PLACES[1:]:
        stop = text(endless[place - 1 : place + 1])
        out |= {f"37 {place} {n}": {**ENDLESS, "stop": stop, "max_tokens": n} for n in range(place, place + K + 2)}
    out |= {f"38 {n}": {**ENDLESS, "max_tokens": n, "logprobs": True} for n in range(1, 2 * K + 2)}
    out |= {f"39 {left}": {**ENDLESS, "token_ids": prompt(CONTEXT - left)} for left in (1, 5, 9)}
    out |= {f"43 {t}": {**ENDLESS, "token_ids": [5], "temperature": t} for t in (0, 1)}
    out |= {f"45 {n}": {**FREE, "min_tokens": n} for n in range(WORD, WORD + 4)}
    return out


@dataclass(frozen=True)
class Truth:
    requests: dict[str, dict[str, Any]]
    answers: dict[str, Answer]

    def tokens(self, name: str) -> list[int]:
        return self.answers[name].tokens

    @property
    def unsaid(self) -> int:
        """A token that no answer has."""
        said = {token for answer in self.answers.values() for token in answer.tokens}
        return next(token for token in range(3, tiny_models.VOCAB) if token not in said)


def truth_of(engine: Engine, seed: int) -> Truth:
    worker = OneWorker(engine)
    free, endless = (worker.run([{**how, "seed": seed}], eos=())[0].tokens for how in (FREE, ENDLESS))
    asked = {name: {**how, "seed": seed} for name, how in requests(free, endless).items()}
    return Truth(asked, dict(zip(asked, worker.run(list(asked.values())), strict=True)))


@pytest.fixture(scope="module")
def truth(engine: Engine) -> Truth:
    return truth_of(engine, SEEDS["engine"])


@pytest.fixture(scope="module")
def known(knower: tuple[Engine, DraftHead]) -> Truth:
    return truth_of(knower[0], SEEDS["knower"])


@pytest.fixture(scope="module", params=["truth", "known"])
def either(request: pytest.FixtureRequest) -> Truth:
    found: Truth = request.getfixturevalue(request.param)
    return found


# What it has to be


def test_case_36_and_45_ends_are_where_the_cases_want_them(either: Truth) -> None:
    """EOS at each place of a block of drafts and before it; never before `min_tokens`."""
    for place in PLACES:
        answer = either.answers[f"36 {place}"]
        assert (len(answer.tokens), answer.tokens[-1], answer.completion.finished) == (place + 1, EOS, "stop")
        assert answer.completion.text == text(answer.tokens[:-1])
    for least in range(WORD, WORD + 4):
        tokens = either.tokens(f"45 {least}")
        assert (len(tokens) == WORD + 1) is (least == WORD)
        assert EOS not in tokens[:least]


def test_case_37_and_38_stops_and_limits_are_exact(either: Truth) -> None:
    """A stop string complete at each place, under limits before and after it; limits of 1 to 2K + 1 tokens."""
    endless = either.tokens("38 9")
    for place in PLACES[1:]:
        for limit in range(place, place + K + 2):
            stopped = limit > place
            kept = endless[: place - 1] if stopped else endless[:limit]
            expected = (endless[: place + stopped], text(kept), "stop" if stopped else "length")
            assert either.answers[f"37 {place} {limit}"].said == expected
    for limit in range(1, 2 * K + 2):
        assert either.answers[f"38 {limit}"].said == (endless[:limit], text(endless[:limit]), "length")


def test_case_39_and_44_the_context_and_the_ban_are_kept_to(either: Truth) -> None:
    """Prompts that leave 1, 5 and 9 positions; penalties that have an effect, and a banned token that is absent."""
    for left in (1, 5, 9):
        assert len(either.tokens(f"39 {left}")) == left
        assert either.answers[f"39 {left}"].completion.finished == "length"
    for temperature in TEMPERATURES:
        assert BANNED not in either.tokens(f"44 bias at {temperature}")
        plain = either.tokens(f"41 at {temperature}")
        assert any(either.tokens(f"44 {name} at {temperature}") != plain for name in STEERED), "none has an effect"


# What it is


Drafter = Callable[[Engine, Truth], StepEngine]


def lots(engine: Engine, _: Truth) -> StepEngine:
    rng = random.Random(1)
    return Guessing(engine, lambda: rng.randrange(tiny_models.VOCAB))


DRAFTERS: dict[str, Drafter | None] = {
    "none": None,
    "good": lambda engine, _: engine,
    "wrong": lambda engine, truth: Guessing(engine, lambda: truth.unsaid),
    "lots": lots,
}


@pytest.mark.parametrize("kind", DRAFTERS)
async def test_cases_35_to_45_with_any_drafter(engine: Engine, truth: Truth, kind: str) -> None:
    """Cases 35, 36, 37, 38, 39, 41, 43, 44 and 45, with drafts all of which are right, none, or hardly any."""
    make = DRAFTERS[kind]
    async with FleetRig() as rig:
        worker = await rig.decode(engine=engine.sibling("none", 1200), **EAGER)
        if make is not None:
            await rig.drafter(engine=make(engine.sibling("none", 1200), truth))
        drafted, accepted = drafts(await says(rig, worker, truth))
    assert (drafted > 0) is (kind != "none")
    low, high = {"none": (0, 0), "wrong": (0, 0), "lots": (0, 0.1), "good": (0.9, 1)}[kind]
    assert low * drafted <= accepted <= high * drafted


async def test_cases_35_to_45_with_a_draft_head(knower: tuple[Engine, DraftHead], known: Truth) -> None:
    """The same, with drafts from hidden states: penalties, bias, `min_tokens`, log-probabilities, stops and ends."""
    engine, head = knower
    async with FleetRig() as rig:
        worker = await rig.decode(engine=engine.sibling("none", 1200), **EAGER)
        drafter = await rig.drafter(engine=engine.sibling("none", 1), source=HeadSource(head))
        said = await says(rig, worker, known)
        assert drafter.counters["drafted_head"] >= drafts(said)[0]
        assert drafter.counters["draft_errors"] == drafter.counters["bad_hidden"] == 0
    by_case: dict[str, list[Completion]] = {}
    for name, answer in zip(known.requests, said, strict=True):
        number, how, *_ = name.split()
        by_case.setdefault(f"{number} {how}" if number == "44" else number, []).append(answer)
    for case, answers in by_case.items():
        drafted, accepted = drafts(answers)
        least = drafted / 2 if case == "37" else drafted - 1  # a stop leaves the drafts after it unused
        assert drafted > 0 and accepted >= least, case


async def says(rig: FleetRig, worker: DecodeWorker, truth: Truth) -> list[Completion]:
    """Ask all at once, and compare."""
    client = rig.client()
    said = await asyncio.gather(*(client.generate(**how) for how in truth.requests.values()))
    for (name, right), answer in zip(truth.answers.items(), said, strict=True):
        check(name, answer, right)
    await rig.quiet()
    assert (worker.counters["drafted_tokens"], worker.counters["accepted_tokens"]) == drafts(said)
    return said


def drafts(said: Sequence[Completion]) -> tuple[int, int]:
    """How many were made, and accepted."""
    usage = [answer.usage for answer in said]
    return sum(u.drafted_tokens for u in usage), sum(u.accepted_tokens for u in usage)


def check(name: str, answer: Completion, right: Answer) -> None:
    assert (list(answer.token_ids), answer.text, answer.finish_reason) == right.said, name
    assert answer.usage.completion_tokens == len(right.tokens), name
    assert answer.usage.accepted_tokens <= min(answer.usage.drafted_tokens, len(right.tokens)), name
    assert len(answer.logprobs) == len(right.logprobs), name
    for found, expected in zip(answer.logprobs, right.logprobs, strict=True):
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4), name
        assert found.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-4), name


async def test_case_46_seeds_alone_in_a_crowd_and_after_a_restart(engine: Engine) -> None:
    """A seed gives one text anywhere; requests without one never share theirs, and tell it."""
    seeded = {**ENDLESS, "seed": 7, "max_tokens": 10}
    unseeded = {name: value for name, value in seeded.items() if name != "seed"}
    async with FleetRig() as rig:
        await rig.drafter(engine=Fallible(engine.sibling("none", 1200)))
        client = rig.client()
        drawn: list[set[tuple[int, ...]]] = []
        for worker in ("decode-1", "decode-2"):
            await rig.decode(worker, engine=engine.sibling("none", 1200), **EAGER)
            alone = [await client.generate(**seeded) for _ in range(2)]
            crowd = await asyncio.gather(*(client.generate(**how) for how in [*[seeded] * 8, *[unseeded] * 8]))
            assert {answer.token_ids for answer in (*alone, *crowd[:8])} == {alone[0].token_ids}
            drawn.append({answer.token_ids for answer in crowd[8:]})
            assert len(drawn[-1]) == 8
            again = await client.generate(**{**unseeded, "seed": crowd[8].seed})
            assert again.token_ids == crowd[8].token_ids
            assert sum(answer.usage.accepted_tokens for answer in crowd) > 0
            await rig.kill(worker)
    assert drawn[0].isdisjoint(drawn[1])


async def test_case_47_rows_of_a_batch_are_not_mixed(engine: Engine) -> None:
    """32 at once on two workers, of which one drafts, with several lengths and temperatures; a third is cancelled."""
    alone = OneWorker(engine)
    asked: dict[str, dict[str, Any]] = {
        f"nonce-{n}": {
            **ENDLESS, "token_ids": prompt(3 + n * 5 % 47, seed=n), "temperature": n % 2, "seed": n,
            "max_tokens": 8 + n % 15,
        }
        for n in range(32)
    }  # fmt: skip
    solo = {name: alone.run([how])[0].tokens for name, how in asked.items()}
    async with FleetRig() as rig:
        drafting = await rig.decode("decode-1", engine=engine.sibling("none", 1200), max_running=12, **EAGER)
        await rig.decode("decode-2", engine=engine.sibling("none", 1200), max_running=12, draft_depth=0)
        await rig.drafter(engine=Fallible(engine.sibling("none", 1200)))
        client = rig.client()

        async def one(name: str, cancel_at: int) -> Completion:
            stream = client.stream(id=name, **asked[name])
            async for delta in stream:
                if delta.index <= cancel_at < delta.index + len(delta.token_ids):
                    await client.cancel(name)
            return stream.completion

        said = await asyncio.gather(*(one(name, n % 7 if n % 3 == 0 else 99) for n, name in enumerate(asked)))
        await rig.quiet()
    for name, answer in zip(asked, said, strict=True):
        assert list(answer.token_ids) == solo[name][: len(answer.token_ids)], name
        assert answer.finish_reason == "cancelled" or len(answer.token_ids) == len(solo[name]), name
    assert sum(answer.finish_reason == "cancelled" for answer in said) > 4
    assert {answer.served_by.decode for answer in said} == {"decode-1", "decode-2"}
    assert 0 < drafting.counters["accepted_tokens"] < drafting.counters["drafted_tokens"]
    wrong = drafting.counters["drafted_tokens"] - drafting.counters["accepted_tokens"]
    assert 0 < drafting.counters["cut_drafts"] <= wrong


LONG = {**tiny_models.ARCHITECTURES["llama"], "max_position_embeddings": 5000}


@pytest.mark.slow
async def test_case_35_long_answers_and_a_long_prompt(tmp_path: Path) -> None:
    """Faults of rolling back add up: some show after hundreds of tokens only."""
    engine = Engine.load(tiny_models.write(tmp_path / "long", LONG), block_size=16, kv_blocks=500)
    endless = {**ENDLESS, "max_tokens": 520}
    asked = [{**endless, "token_ids": prompt(20 + n, seed=n), "temperature": t} for n, t in enumerate((0, 1.0))]
    asked.append({**endless, "token_ids": prompt(4200), "max_tokens": 100})
    right = [answer.tokens for answer in OneWorker(engine).run(asked)]
    assert [len(tokens) for tokens in right] == [520, 520, 100]
    async with FleetRig() as rig:
        await rig.decode(engine=engine.sibling("none", 500), block_size=16, **EAGER)
        await rig.drafter(engine=Fallible(engine.sibling("none", 500)), block_size=16)
        client = rig.client()
        said = await asyncio.gather(*(client.generate(**how) for how in asked))
        assert [list(answer.token_ids) for answer in said] == right
        for answer in said:
            assert 0.3 < answer.usage.accepted_tokens / answer.usage.drafted_tokens < 0.9
        await rig.quiet()
