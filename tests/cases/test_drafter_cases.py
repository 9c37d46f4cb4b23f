"""Asks that would end, stall or bloat a drafter: repeated, contradictory, foreign, too many, too long."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from services.drafter import service, sessions
from services.drafter.service import DrafterWorker
from services.drafter.sessions import ADMITTED, OVERHEAD
from services.drafter.sources.model import ModelSource
from services.drafter.sources.suffix import SuffixSource
from shared.codec import decode, encode
from shared.messages import MAX_SESSION_TOKENS, DraftAsk, DraftItem, Drafts, Sampling
from shared.subjects import Subjects
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL, FleetRig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SUBJECT = Subjects(MODEL).draft("drafter-1")


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def item(session: str = "s", tokens: list[int] | None = None, base: int = 0, k: int = 4) -> DraftItem:
    told = prompt(10) if tokens is None else tokens
    return DraftItem(session=session, base=base, token_ids=told, k=k, sampling=Sampling())


async def ask(rig: FleetRig, *items: DraftItem, ended: tuple[str, ...] = (), wait_ms: float = 1000.0) -> Drafts:
    data = encode(DraftAsk(worker="w", wait_ms=wait_ms, items=list(items), ended=list(ended)))
    return decode((await rig.bus().request(SUBJECT, data, timeout=5.0)).data, Drafts)


def by_session(answer: Drafts) -> dict[str, list[int]]:
    return {d.session: d.token_ids for d in answer.drafts}


def model_of(worker: DrafterWorker) -> ModelSource:
    assert isinstance(worker._model, ModelSource)
    return worker._model


def suffix_of(worker: DrafterWorker) -> SuffixSource:
    assert worker._suffix is not None
    return worker._suffix


# Repeated and contradictory asks


async def test_a_session_asked_about_again_before_the_answer_gets_one_answer_with_drafts() -> None:
    """The asker gave up and asked again: a batch with a session twice would write its blocks twice."""
    async with FleetRig() as rig:
        engine = FakeEngine(step_s=0.03)
        drafter = await rig.drafter(engine=engine)
        first = asyncio.create_task(ask(rig, item("other", prompt(5, 1))))
        await asyncio.sleep(0.02)  # the engine is busy with it while the next three arrive
        longer = [*prompt(10), 7]
        stale, newest, beside = await asyncio.gather(
            ask(rig, item("s", prompt(10))), ask(rig, item("s", [7], base=10)), ask(rig, item("t", prompt(6, 2)))
        )
        assert by_session(await first) == {"other": completion(prompt(5, 1), 4)}
        assert by_session(stale) == {}
        assert by_session(newest) == {"s": completion(longer, 4)}
        assert by_session(beside) == {"t": completion(prompt(6, 2), 4)}
        assert drafter.counters["draft_errors"] == 0


async def test_a_draft_model_slower_than_the_wait_costs_no_answer_and_no_worker() -> None:
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=128, step_s=0.005), draft_depth=4, draft_wait_ms=15)
        drafter = await rig.drafter(engine=FakeEngine(blocks=128, step_s=0.02))
        answer = await rig.client().generate(token_ids=prompt(30), max_tokens=40)
        assert list(answer.token_ids) == completion(prompt(30), 40)
        assert drafter.counters["drafted_model"] > 0
        assert drafter.counters["draft_errors"] == 0


@pytest.mark.parametrize("source", ["model", "auto", "suffix"])
async def test_a_session_named_twice_in_one_ask_is_refused_alone(source: str) -> None:
    loop = [4, 5, 6] * 5
    async with FleetRig() as rig:
        drafter = await rig.drafter(draft_source=source)
        answer = await ask(rig, item("s", loop), item("t", loop), item("s", loop[:9]))
        assert answer.unknown == ["s"]
        assert set(by_session(answer)) == {"t"}
        assert drafter.counters["draft_errors"] == 0


# Foreign tokens, endless patience, endless sequences


@pytest.mark.parametrize("source", ["model", "auto", "suffix"])
async def test_ids_beyond_the_vocabulary_are_not_kept(source: str) -> None:
    async with FleetRig() as rig:
        drafter = await rig.drafter(draft_source=source)
        assert (await ask(rig, item(tokens=[5000]))).unknown == ["s"]
        assert (await ask(rig, item(tokens=[1, 2], base=1))).unknown == ["s"]
        assert (await ask(rig, item(tokens=[1, 2, 1, 2]))).unknown == []
        assert (await ask(rig, item(tokens=[1000], base=4))).unknown == ["s"]
        assert (await ask(rig, item(tokens=[1], base=4))).unknown == ["s"], "the session was kept"
        assert drafter.counters["draft_errors"] == 0


async def test_a_session_with_no_tokens_is_unknown() -> None:
    async with FleetRig() as rig:
        drafter = await rig.drafter()
        answer = await ask(rig, item("empty", []), item("s"))
        assert answer.unknown == ["empty"]
        assert by_session(answer) == {"s": completion(prompt(10), 4)}
        assert drafter.counters["draft_errors"] == 0


async def test_a_session_cannot_grow_without_end() -> None:
    async with FleetRig() as rig:
        drafter = await rig.drafter(draft_source="suffix")
        assert (await ask(rig, item(tokens=[1] * MAX_SESSION_TOKENS))).unknown == []
        assert (await ask(rig, item(tokens=[1], base=MAX_SESSION_TOKENS))).unknown == ["s"]
        assert len(drafter._sessions) == 0


# A pool too small for the batch


async def test_a_fleet_whose_drafter_has_a_small_pool() -> None:
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=128, step_s=0.005), **EAGER)
        drafter = await rig.drafter(engine=FakeEngine(blocks=16))
        client = rig.client()
        answers = await asyncio.gather(*(client.generate(token_ids=prompt(30, n), max_tokens=20) for n in range(4)))
        assert [list(a.token_ids) for a in answers] == [completion(prompt(30, n), 20) for n in range(4)]
        assert drafter.counters["drafted_model"] > 0
        assert drafter.counters["draft_errors"] == 0


# Failures


async def test_a_session_that_the_draft_model_fails_at_is_given_up_and_costs_nobody_else_anything() -> None:
    async with FleetRig() as rig:
        engine = FakeEngine()
        drafter = await rig.drafter(engine=engine)
        await ask(rig, item("a"), item("b"))
        engine.poison = 999
        answer = await ask(rig, item("a", [999], base=10), item("b", [1], base=10))
        assert by_session(answer) == {"b": completion([*prompt(10), 1], 4)}
        assert answer.unknown == []
        assert drafter.counters["draft_errors"] == 2, "once together, once alone"
        answer = await ask(rig, item("a", [2], base=11), item("b", [2], base=11))
        assert by_session(answer) == {"b": completion([*prompt(10), 1, 2], 4)}
        assert drafter.counters["draft_errors"] == 2
        await ask(rig, ended=("b",))
        await asyncio.sleep(0.02)
        assert model_of(drafter)._allocator.in_use == 0, "what the failed step left was kept"


async def test_guesses_beyond_the_targets_vocabulary_are_cut() -> None:
    """Weights may be for more ids than the tokenizer has."""
    async with FleetRig() as rig:
        drafter = await rig.drafter()
        tokens = [0, 1]
        right = completion(tokens, 6)
        drafter._vocab_size = right[3]
        assert max(right[:3]) < right[3] > right[4]
        assert by_session(await ask(rig, item("s", tokens, k=6))) == {"s": right[:3]}
        assert drafter.counters["guesses_cut"] == 3


async def test_an_answer_that_the_bus_refuses_is_counted() -> None:
    async with FleetRig() as rig:
        drafter = await rig.drafter(engine=FakeEngine(blocks=256))
        items = [item(f"s{n}", k=64) for n in range(8)]
        rig._buses["drafter-1"][0].max_payload = 1500  # beats fit
        await rig.bus().publish(SUBJECT, encode(DraftAsk(worker="w", wait_ms=1e4, items=items)), reply="_INBOX.x")
        async with asyncio.timeout(5):
            while not drafter.counters["answers_unsent"]:
                await asyncio.sleep(0.01)
        assert set(by_session(await ask(rig, item("t")))) == {"t"}


# Sessions that are over

ROOM_FOR_8 = int(8 * (OVERHEAD + 6) / ADMITTED) + 1


@pytest.mark.parametrize("source", ["model", "auto", "suffix"])
async def test_sessions_whose_asker_is_gone_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SWEEP_S", 0.01)
    monkeypatch.setattr(sessions, "IDLE_S", 0.1)
    async with FleetRig() as rig:
        drafter = await rig.drafter(draft_source=source)
        await ask(rig, item("a"), item("b", prompt(10, 1)))
        assert len(drafter._sessions) == 2
        await asyncio.sleep(0.3)
        assert len(drafter._sessions) == 0
        if source != "model":
            assert not suffix_of(drafter)._indexes
        if source != "suffix":
            assert model_of(drafter)._allocator.in_use == 0
        assert (await ask(rig, item("a", [1], base=10))).unknown == ["a"]


@pytest.mark.parametrize("source", ["model", "auto", "suffix"])
async def test_sessions_beyond_the_limit_leave_nothing_behind(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "BUSY_S", 0.02)
    async with FleetRig() as rig:
        drafter = await rig.drafter(draft_source=source, session_tokens=ROOM_FOR_8)
        for n in range(5):
            answer = await ask(rig, *(item(f"{n}-{i}", prompt(6, i)) for i in range(40)))
            assert answer.unknown == [f"{n}-{i}" for i in range(8, 40)]
            await asyncio.sleep(0.03)
        await asyncio.sleep(0.05)
        assert len(drafter._sessions) == 8
        if source != "model":
            assert len(suffix_of(drafter)._indexes) <= 8
        if source != "suffix":
            assert len(model_of(drafter)._chains) <= 8


@pytest.mark.parametrize("source", ["model", "auto", "suffix"])
async def test_ended_sessions_are_freed_without_another_wish(source: str) -> None:
    async with FleetRig() as rig:
        drafter = await rig.drafter(draft_source=source)
        await ask(rig, item("a"), item("b", prompt(10, 1)))
        await ask(rig, ended=("a", "b"))
        await asyncio.sleep(0.05)
        if source != "model":
            assert not suffix_of(drafter)._indexes
        if source != "suffix":
            assert not model_of(drafter)._chains
            assert model_of(drafter)._allocator.in_use == 0


async def test_a_session_that_ends_while_its_wish_waits_is_not_begun_again() -> None:
    async with FleetRig() as rig:
        drafter = await rig.drafter(engine=FakeEngine(step_s=0.03))
        asks = [asyncio.create_task(ask(rig, item("other", prompt(5, 1), k=2)))]
        await asyncio.sleep(0.02)
        asks.append(asyncio.create_task(ask(rig, item("s"))))
        await asyncio.sleep(0.01)
        asks.append(asyncio.create_task(ask(rig, ended=("s",))))
        answers = await asyncio.gather(*asks)
        assert [set(by_session(a)) for a in answers] == [{"other"}, set(), set()]
        assert {s.key[1] for s in model_of(drafter)._chains} == {"other"}


# Long sequences


async def test_an_unread_prompt_denies_drafts_to_nobody_else() -> None:
    """With `auto` the others of the ask are answered, and the prompt is read in between."""
    async with FleetRig() as rig:
        engine = FakeEngine(blocks=1000, context=4000, step_s=0.003)
        await rig.drafter(engine=engine, draft_source="auto")
        short, long = prompt(10), prompt(3000, 1)
        await ask(rig, item("short", short))
        answer = await ask(rig, item("short", [], base=10), item("long", long), wait_ms=15.0)
        assert set(by_session(answer)) == {"short"}
        for _ in range(40):
            await asyncio.sleep(0.02)
            answer = await ask(rig, item("short", [], base=10), item("long", [], base=3000), wait_ms=30.0)
            if drafts := [d.token_ids for d in answer.drafts if (d.session, d.source) == ("long", "model")]:
                break
        assert drafts == [completion(long, len(drafts[0]))]
        assert by_session(answer)["short"]


# What one session brings another


async def test_a_warm_prompt_is_drafted_for_as_well_as_a_cold_one_and_not_read_again() -> None:
    """Also when its session is new to the drafter: another worker's, one preempted, one of the next turn."""
    async with FleetRig() as rig:
        engine = FakeEngine(blocks=256)
        await rig.drafter(engine=engine)
        tokens, computed = prompt(100), []
        for name in ("acme/1", "acme/2", "other/1"):
            before = engine.tokens_computed
            answer = await ask(rig, item(name, tokens))
            computed.append(engine.tokens_computed - before)
            assert by_session(answer) == {name: completion(tokens, 4)}
            await asyncio.sleep(0.02)  # it guesses ahead
        assert computed[1] < 20 < 100 < computed[2]


@pytest.mark.parametrize(("name", "salt", "finds"), [("a/2", "", True), ("b/2", "", False), ("a/2", "x", False)])
async def test_past_outputs_help_the_same_tenant_alone(name: str, salt: str, finds: bool) -> None:
    output = random.Random(3).sample(range(1000), 120)
    async with FleetRig() as rig:
        await rig.drafter(draft_source="suffix")
        await ask(rig, item("a/1", output).model_copy(update={"prompt_len": 1}))
        await ask(rig, ended=("a/1",))
        await asyncio.sleep(0.05)
        answer = await ask(rig, item(name, output[50:60]).model_copy(update={"salt": salt}))
        assert by_session(answer) == ({name: output[60:64]} if finds else {})


# Ahead


async def test_an_ask_that_goes_on_as_guessed_is_answered_at_once() -> None:
    async with FleetRig() as rig:
        engine = FakeEngine(step_s=0.02)
        drafter = await rig.drafter(engine=engine)
        source = model_of(drafter)
        source.record.rates = [0.97] * 4
        tokens = prompt(10)
        await ask(rig, item("s", tokens))
        await asyncio.sleep(0.3)
        right = completion(tokens, 9)
        source._engine.step = None  # type: ignore[method-assign,assignment]
        answer = await ask(rig, item("s", right[:5], base=10), wait_ms=10.0)
        assert by_session(answer) == {"s": right[5:9]}


async def test_a_slow_model_answers_with_what_there_is_when_time_is_up() -> None:
    async with FleetRig() as rig:
        await rig.drafter(engine=FakeEngine(step_s=0.03))
        answer = await ask(rig, item("s", k=60), wait_ms=200.0)
        found = by_session(answer)["s"]
        assert 0 < len(found) < 8
        assert found == completion(prompt(10), len(found))


async def test_the_suffix_stands_in_when_the_model_is_not_in_time() -> None:
    """The model promised more, but then its step took far longer than it used to."""
    loop = [4, 5, 6] * 5
    async with FleetRig() as rig:
        engine = FakeEngine(blocks=256)
        drafter = await rig.drafter(engine=engine, draft_source="auto")
        assert drafter._suffix is not None
        drafter._suffix.record.rates = [0.4] * len(drafter._suffix.record.rates)
        engine._step_s = 0.1
        first = asyncio.create_task(ask(rig, item("t", prompt(8, 5)), wait_ms=30.0))
        await asyncio.sleep(0.02)
        answer = await ask(rig, item("s", loop), wait_ms=30.0)
        await first
        assert {d.source for d in answer.drafts} == {"suffix"}
        assert by_session(answer)["s"][0] == 4


async def test_asks_of_many_workers_share_steps() -> None:
    async with FleetRig() as rig:
        engine = FakeEngine(blocks=512, step_s=0.02)
        await rig.drafter(engine=engine)
        before = engine.steps
        data = [
            encode(DraftAsk(worker=f"w{n}", wait_ms=5000.0, items=[item(f"a/{n}", prompt(9, n))])) for n in range(12)
        ]
        bus = rig.bus()
        replies = await asyncio.gather(*(bus.request(SUBJECT, d, timeout=5.0) for d in data))
        assert engine.steps - before <= 8, "as many steps as for one or two of them"
        for n, reply in enumerate(replies):
            assert by_session(decode(reply.data, Drafts)) == {f"a/{n}": completion(prompt(9, n), 4)}


# Which source


@pytest.mark.parametrize("wrong", [False, True])
async def test_auto_learns_which_source_is_right(wrong: bool) -> None:
    """The model knows everything or nothing, the suffix source is right about half of the time."""
    truth = completion(prompt(30), 250)
    async with FleetRig() as rig:
        engine = FakeEngine(blocks=512, step_s=0.002, wrong_every=int(wrong))
        drafter = await rig.drafter(engine=engine, draft_source="auto")
        told, sources = 0, []
        tokens = prompt(30)
        while len(tokens) < 270:
            answer = await ask(rig, item("a/s", tokens[told:], base=told), wait_ms=50.0)
            told = len(tokens)
            await asyncio.sleep(0.01)  # the target's step
            drafts = by_session(answer).get("a/s", [])
            rest = truth[len(tokens) - 30 :]
            right = next((i for i, (d, t) in enumerate(zip(drafts, rest, strict=False)) if d != t), len(drafts))
            tokens += rest[: right + 1]
            sources += [d.source for d in answer.drafts]
        last = sources[len(sources) // 2 :]
        assert last.count("model") < 0.2 * len(last) if wrong else last.count("model") > 0.5 * len(last)
        assert drafter.counters["draft_errors"] == 0


# All at once


@pytest.mark.parametrize("source", ["model", "auto"])
async def test_a_storm_of_asks_ends_and_failures_leaves_drafts_exact_and_nothing_behind(source: str) -> None:
    rng = random.Random(5)
    async with FleetRig() as rig:
        engine = FakeEngine(blocks=48)
        drafter = await rig.drafter(engine=engine, draft_source=source, session_tokens=4000)
        drafted = 0

        async def asker(worker: str) -> None:
            nonlocal drafted
            bus, sessions = rig.bus(), dict[str, list[int]]()
            for turn in range(40):
                name = f"{rng.choice('ab')}/{worker}{rng.randrange(8)}"
                tokens = sessions.setdefault(name, prompt(rng.randrange(1, 60), rng.randrange(2)))
                base = rng.choice([0, len(tokens) // 2, len(tokens)])
                tokens += completion(tokens, rng.randrange(4))
                tokens += [rng.choice([999, 7])] * rng.randrange(2)
                engine.poison = 999 if rng.random() < 0.05 else None
                ended = [sessions_name for sessions_name in sessions if rng.random() < 0.03 and sessions_name != name]
                items = [item(name, tokens[base:], base=base, k=rng.randrange(1, 6))]
                data = encode(DraftAsk(worker=worker, wait_ms=rng.choice([1.0, 50.0]), items=items, ended=ended))
                if rng.random() < 0.1:
                    data = data[: rng.randrange(len(data))]
                    await bus.publish(SUBJECT, data)
                    continue
                answer = decode((await bus.request(SUBJECT, data, timeout=5.0)).data, Drafts)
                assert set(answer.unknown) <= {name}
                for draft in answer.drafts:
                    assert (draft.session, draft.position) == (name, len(tokens))
                    if draft.source == "model":
                        assert draft.token_ids == completion(tokens, len(draft.token_ids)), turn
                        drafted += 1
                for over in ended:
                    del sessions[over]
            await bus.publish(SUBJECT, encode(DraftAsk(worker=worker, wait_ms=1.0, items=[], ended=list(sessions))))

        await asyncio.gather(*(asker(f"w{n}") for n in range(4)))
        assert drafted > 10
        async with asyncio.timeout(5):
            while model_of(drafter)._chains or drafter._pending or drafter.load().running:
                await asyncio.sleep(0.01)
        assert model_of(drafter)._allocator.in_use == 0
        model_of(drafter)._allocator.check_integrity([])
        assert drafter._sessions.size <= 4000


# Contradictions


async def test_a_bias_for_a_token_that_does_not_exist_is_not_taken_in() -> None:
    async with FleetRig() as rig:
        drafter = await rig.drafter()
        bad = item("s").model_copy(update={"sampling": Sampling(logit_bias={1000: 5.0})})
        assert (await ask(rig, bad, item("t"))).unknown == ["s"]
        assert drafter.counters["draft_errors"] == 0


async def test_a_prompt_longer_than_the_sequence_harms_nobody() -> None:
    async with FleetRig() as rig:
        drafter = await rig.drafter(draft_source="auto")
        for sampling in (Sampling(), Sampling(repetition_penalty=1.3)):
            odd = item("a/s").model_copy(update={"prompt_len": 10**6, "sampling": sampling})
            assert (await ask(rig, odd)).unknown == []
        await ask(rig, ended=("a/s",))
        assert drafter.counters["draft_errors"] == 0


async def test_a_session_that_comes_with_another_salt_is_unknown() -> None:
    async with FleetRig() as rig:
        await rig.drafter()
        await ask(rig, item("a/s"))
        salted = item("a/s", [1], base=10).model_copy(update={"salt": "x"})
        assert (await ask(rig, salted)).unknown == ["a/s"]


# With a decode worker: whatever the drafter does, the text is the target's


EAGER: dict[str, Any] = {"draft_depth": 4, "draft_wait_ms": 200, "draft_adaptive": False}


@pytest.mark.parametrize("source", ["model", "auto"])
async def test_acceptance_after_a_prefix_hit_and_after_preemption_is_that_of_a_cold_prompt(source: str) -> None:
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=40), **EAGER)
        await rig.drafter(engine=FakeEngine(blocks=400), draft_source=source)
        client = rig.client()
        rates = []
        for _ in range(2):
            answer = await client.generate(token_ids=prompt(40), max_tokens=40)
            rates.append(answer.usage.accepted_tokens / answer.usage.drafted_tokens)
        crowd = await asyncio.gather(*(client.generate(token_ids=prompt(40, n), max_tokens=40) for n in range(5)))
        for n, answer in enumerate(crowd):
            assert list(answer.token_ids) == completion(prompt(40, n), 40)
        accepted, drafted = (sum(getattr(a.usage, f"{x}_tokens") for a in crowd) for x in ("accepted", "drafted"))
        rates.append(accepted / drafted)
        assert min(rates) > (0.95 if source == "model" else 0.6)
        assert max(rates) - min(rates) < (0.1 if source == "model" else 0.3)


@pytest.mark.parametrize("context", [20, 31, 60, 75])
async def test_a_draft_model_with_less_context_than_the_target(context: int) -> None:
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=64, context=100), **EAGER)
        drafter = await rig.drafter(engine=FakeEngine(blocks=64, context=context))
        answer = await rig.client().generate(token_ids=prompt(30), max_tokens=70)
        assert list(answer.token_ids) == completion(prompt(30), 70)
        assert answer.finish_reason == "length"
        assert (answer.usage.drafted_tokens > 0) is (context > 31)
        assert drafter.counters["draft_errors"] == 0


@pytest.mark.parametrize("length", [1, 9])
async def test_a_drafter_that_is_the_target_and_one_that_is_always_wrong(length: int) -> None:
    for wrong_every, all_accepted in ((0, True), (1, False)):
        async with FleetRig() as rig:
            await rig.decode(engine=FakeEngine(blocks=64, seeded=True), **EAGER)
            await rig.drafter(engine=FakeEngine(blocks=64, seeded=True, wrong_every=wrong_every))
            answer = await rig.client().generate(token_ids=prompt(length), max_tokens=40, seed=11, temperature=1.0)
            assert list(answer.token_ids) == completion(prompt(length), 40, seed=11)
            assert answer.usage.drafted_tokens > 0
            assert answer.usage.accepted_tokens == (answer.usage.drafted_tokens if all_accepted else 0)


async def test_past_outputs_that_mislead_cost_speed_only() -> None:
    """The same prompt with another seed goes on otherwise: what the history promises is wrong."""
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=128, seeded=True), **EAGER)
        drafter = await rig.drafter(draft_source="suffix")
        client = rig.client()
        for seed in (1, 2, 1, 3):
            answer = await client.generate(token_ids=prompt(30), max_tokens=50, seed=seed, temperature=1.0)
            assert list(answer.token_ids) == completion(prompt(30), 50, seed=seed)
            await asyncio.sleep(0.05)
        assert drafter.counters["drafted_suffix"] > 0


async def test_a_drafter_killed_half_way_and_started_again_is_asked_again() -> None:
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=128, step_s=0.01, context=600), **EAGER)
        await rig.drafter()
        stream = rig.client().stream(token_ids=prompt(30), max_tokens=300)
        tokens: list[int] = []
        restarted = False
        async for delta in stream:
            tokens += delta.token_ids
            if len(tokens) > 20 and "drafter-1" in rig.workers and not restarted:
                await rig.kill("drafter-1")
            elif len(tokens) > 40 and not restarted:
                restarted = True
                await rig.drafter("drafter-2")
        assert tokens == completion(prompt(30), 300)
        assert {name.split(":")[0] for name in stream.completion.served_by.drafter} == {"drafter-1", "drafter-2"}
