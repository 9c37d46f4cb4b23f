"""A draft head in a fleet: hidden states reach it, drafts are accepted, and whatever it says the text is the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.drafter.sources.head import HeadSource
from shared.codec import decode, encode
from shared.engine.draft_head import DraftHead
from shared.engine.engine import Engine
from shared.engine.span import Span
from shared.messages import DraftAsk, DraftItem, Drafts, Sampling
from shared.subjects import Subjects
from tests import draft_release
from tests.fake_engine import HIDDEN, FakeEngine, completion, hidden_state
from tests.fake_head import FakeHead
from tests.fleet_rig import MODEL, FleetRig
from trine.completion import Completion

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SUBJECT = Subjects(MODEL).draft("drafter-1")
EAGER: dict[str, Any] = {"draft_depth": 4, "draft_wait_ms": 200, "draft_adaptive": False}


def prompt(length: int, seed: int = 0, vocab: int = 1000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(length)]


def item(tokens: list[int], hidden: bytes, session: str = "s") -> DraftItem:
    sampling = Sampling(temperature=0.0)
    return DraftItem(session=session, base=0, token_ids=tokens, k=4, sampling=sampling, hidden=hidden)


def true_state(tokens: Sequence[int]) -> bytes:
    return hidden_state(len(tokens) - 1, tokens[-1])


async def ask(rig: FleetRig, *items: DraftItem) -> dict[str, list[int]]:
    data = encode(DraftAsk(worker="w", wait_ms=1000.0, items=list(items)))
    answer = decode((await rig.bus().request(SUBJECT, data, timeout=5.0)).data, Drafts)
    assert {draft.source for draft in answer.drafts} <= {"head", "suffix"}
    return {draft.session: draft.token_ids for draft in answer.drafts}


@pytest.mark.parametrize("source", ["model", "auto"])
async def test_a_right_head_is_accepted_in_every_step_but_the_first(source: str) -> None:
    """The fake head refuses states, tokens and places that do not belong together."""
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=128), **EAGER)
        drafter = await rig.drafter(source=HeadSource(FakeHead()), draft_source=source)
        await asyncio.sleep(0.15)  # beats
        answer = await rig.client().generate(token_ids=prompt(30), max_tokens=41)
        assert list(answer.token_ids) == completion(prompt(30), 41)
        assert drafter.counters["draft_errors"] == drafter.counters["bad_hidden"] == 0
        assert answer.usage.accepted_tokens >= 28, "of 40 after the first token; four of five where nothing is lost"
        assert answer.usage.accepted_tokens >= 0.9 * answer.usage.drafted_tokens
        assert drafter.counters["drafted_head"] > 0


async def test_sequences_of_two_workers_share_its_steps_and_a_wrong_one_changes_nothing() -> None:
    head = FakeHead(wrong_every=3)
    async with FleetRig() as rig:
        for name in ("decode-1", "decode-2"):
            await rig.decode(name, engine=FakeEngine(blocks=128, step_s=0.002), **EAGER)
        await rig.drafter(source=HeadSource(head))
        await asyncio.sleep(0.15)
        client = rig.client()
        answers = await asyncio.gather(*(client.generate(token_ids=prompt(30, n), max_tokens=30) for n in range(6)))
        assert [list(a.token_ids) for a in answers] == [completion(prompt(30, n), 30) for n in range(6)]
        assert max(head.steps) > 1
        assert 0 < sum(a.usage.accepted_tokens for a in answers) < sum(a.usage.drafted_tokens for a in answers)


@pytest.mark.parametrize("hidden", [b"x", bytes(2 * HIDDEN + 2), np.full(HIDDEN, np.nan, "<f2").tobytes()])
async def test_bytes_that_are_no_hidden_state_are_counted_and_ignored(hidden: bytes) -> None:
    tokens, loop = prompt(10), [4, 5, 6] * 5
    async with FleetRig() as rig:
        drafter = await rig.drafter(source=HeadSource(FakeHead()), draft_source="auto")
        found = await ask(
            rig, item(tokens, hidden, "bad"), item(tokens, true_state(tokens)), item(loop, hidden, "loop")
        )
        assert found == {"s": completion(tokens, 4), "loop": [4, 5, 6, 4]}, "the others, and other sources"
        assert drafter.counters["bad_hidden"] == 2
        assert await ask(rig, item(tokens, b"", "none")) == {}
        assert drafter.counters["bad_hidden"] == 2
        assert drafter.counters["draft_errors"] == 0


async def test_a_drafter_that_reads_none_does_not_mind_being_told_some() -> None:
    async with FleetRig() as rig:
        drafter = await rig.drafter()
        assert drafter.hidden_size() == 0
        tokens = prompt(10)
        data = encode(DraftAsk(worker="w", wait_ms=1000.0, items=[item(tokens, b"anything")]))
        answer = decode((await rig.bus().request(SUBJECT, data, timeout=5.0)).data, Drafts)
        assert [draft.token_ids for draft in answer.drafts] == [completion(tokens, 4)]
        assert drafter.counters["bad_hidden"] == 0


async def test_a_head_that_fails_costs_neither_worker_nor_answer() -> None:
    head = FakeHead()
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=128), **EAGER)
        drafter = await rig.drafter(source=HeadSource(head), draft_source="auto")
        await asyncio.sleep(0.15)
        head.poison = completion(prompt(30), 8)[-1]
        answer = await rig.client().generate(token_ids=prompt(30), max_tokens=30)
        assert list(answer.token_ids) == completion(prompt(30), 30)
        head.poison = None
        assert (await rig.client().generate(token_ids=prompt(20, 1), max_tokens=20)).usage.accepted_tokens > 0
        assert drafter.counters["draft_errors"] <= 1


async def test_where_the_head_turns_out_not_to_be_sure_the_suffix_answers() -> None:
    """The head promises more until it has guessed."""
    tokens = prompt(12)
    tokens += [*tokens[:2]]
    async with FleetRig() as rig:
        head = FakeHead(likely=0.9)
        await rig.drafter(source=HeadSource(head), draft_source="auto")
        for number in range(24):  # until it is known how far the head gets
            other = prompt(12, number)
            await asyncio.sleep(0.01)  # its step
            await ask(rig, item(other, true_state(other), f"other-{number}"))
        await asyncio.sleep(0.01)
        assert await ask(rig, item(tokens, true_state(tokens), "sure")) == {"sure": completion(tokens, 4)}
        head.steps.clear()
        head.likely = 0.2
        await asyncio.sleep(0.01)
        found = await ask(rig, item(tokens, true_state(tokens), "unsure"))
        assert found["unsure"][:2] == tokens[2:4]
        assert head.steps


@pytest.mark.parametrize("mishap", ["it is unsure for long", "the machine stalls"])
async def test_a_head_that_was_given_up_is_tried_again(mishap: str) -> None:
    async with FleetRig() as rig:
        head = FakeHead(likely=0.97)
        source = HeadSource(head)
        await rig.drafter(source=source, draft_source="auto")

        async def answered(start: int, count: int) -> int:
            """Asks that the head answers."""
            drafts = 0
            for number in range(start, start + count):
                tokens = prompt(12, number)
                await asyncio.sleep(0.005)  # its step
                drafts += len(await ask(rig, item(tokens, true_state(tokens), f"s{number}")))
            return drafts

        assert await answered(0, 20) == 20
        if mishap == "the machine stalls":
            head.stall_s = 0.4
            await answered(20, 1)
        else:
            head.likely = 0.01
            assert await answered(20, 60) <= 6
            head.likely = 0.97
        await answered(100, 150)
        assert await answered(300, 20) >= 18


# A real engine and a real head


VOCAB, COUNT = 128, 32


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, release = (tmp_path_factory.mktemp(name) for name in ("target", "release"))
    draft_release.write_perfect(target, release, vocab=VOCAB)
    return target, release


def engine(target: Path) -> Engine:
    made = Engine.load(target, block_size=8, kv_blocks=64, threads=1)
    made.info = replace(made.info, eos_ids=frozenset(), vocabulary="fake-vocabulary")
    return made


def alone(target: Path, tokens: list[int], sampling: Sampling) -> list[int]:
    """One token at a time, without drafts."""
    one, known, done = engine(target), list(tokens), 0
    table = tuple(range(-(-(len(tokens) + COUNT) // 8)))
    while len(known) < len(tokens) + COUNT:
        span = Span(tuple(known[done:]), done, table, 1, sampling.seed or 0, sampling)
        done = len(known)
        known += one.step([span])[0]
    return known[len(tokens) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_perfect_head_is_always_accepted_at_any_temperature(
    pair: tuple[Path, Path], temperature: float
) -> None:
    """Its logits are the target's and so is its noise: whatever the target draws, it has drawn too."""
    target, release = pair
    prompts = [prompt(20, n, VOCAB) for n in range(2)]
    sampling = Sampling(temperature=temperature, seed=5)
    expected = [alone(target, tokens, sampling) for tokens in prompts]
    head = DraftHead.load(release, target, threads=1)

    async def answer(rig: FleetRig, tokens: list[int]) -> Completion:
        return await rig.client().generate(token_ids=tokens, max_tokens=COUNT, temperature=temperature, seed=5)

    async with FleetRig() as rig:
        await rig.decode(engine=engine(target), block_size=8, **EAGER)
        drafter = await rig.drafter(source=HeadSource(head))
        await asyncio.sleep(0.15)
        answers = await asyncio.gather(*(answer(rig, tokens) for tokens in prompts))
        assert [list(a.token_ids) for a in answers] == expected
        assert len({token for tokens in expected for token in tokens}) > 4
        drafted = sum(a.usage.drafted_tokens for a in answers)
        assert sum(a.usage.accepted_tokens for a in answers) >= 0.95 * drafted > COUNT
        assert drafter.counters["draft_errors"] == drafter.counters["bad_hidden"] == 0
