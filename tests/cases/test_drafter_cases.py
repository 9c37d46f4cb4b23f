"""Asks that would end, stall or bloat a drafter: repeated, contradictory, foreign, too many, too long."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from services.drafter.service import DrafterWorker
from services.drafter.sessions import MAX_TOKENS, Session, SessionTable
from services.drafter.sources.base import Wish
from services.drafter.sources.lookup import Lookup
from services.drafter.sources.model import ModelSource
from shared.codec import decode, encode
from shared.messages import DraftAsk, DraftItem, Drafts, Sampling
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


def wish(session: Session, k: int = 4, budget_s: float = 10.0) -> Wish:
    return Wish(session, session.tokens, len(session.tokens), k, Sampling(), budget_s)


def model_source(worker: DrafterWorker) -> ModelSource:
    assert isinstance(worker._slow, ModelSource)
    return worker._slow


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


@pytest.mark.parametrize("source", ["model", "auto", "lookup"])
async def test_a_session_named_twice_in_one_ask_is_refused_alone(source: str) -> None:
    loop = [4, 5, 6] * 5
    async with FleetRig() as rig:
        drafter = await rig.drafter(draft_source=source)
        answer = await ask(rig, item("s", loop), item("t", loop), item("s", loop[:9]))
        assert answer.unknown == ["s"]
        assert set(by_session(answer)) == {"t"}
        assert drafter.counters["draft_errors"] == 0


# Foreign tokens, endless patience, endless sequences


@pytest.mark.parametrize("source", ["model", "auto", "lookup"])
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


@pytest.mark.parametrize("budget_s", [math.inf, 1.7e305])
def test_patience_without_end_is_not_more_than_all_drafts(budget_s: float) -> None:
    source = ModelSource(FakeEngine(), within_budget=True)
    session = Session(("w", "s"), prompt(10))
    assert source.draft([wish(session, budget_s=budget_s)]) == [completion(prompt(10), 4)]


async def test_a_session_cannot_grow_without_end() -> None:
    async with FleetRig() as rig:
        drafter = await rig.drafter(draft_source="lookup")
        assert (await ask(rig, item(tokens=[1] * MAX_TOKENS))).unknown == []
        assert (await ask(rig, item(tokens=[1], base=MAX_TOKENS))).unknown == ["s"]
        assert len(drafter._sessions) == 0


# A pool too small for the batch


def test_a_pool_smaller_than_the_batch_serves_those_that_fit() -> None:
    """In every round somebody is served, though all of them hold blocks and want more."""
    source = ModelSource(FakeEngine(blocks=16, block_size=4), within_budget=False)
    sessions = [Session(("w", str(n)), prompt(20, n)) for n in range(4)]
    for _ in range(8):
        found = source.draft([wish(s) for s in sessions])
        assert any(found)
        for session, drafts in zip(sessions, found, strict=True):
            assert drafts in ([], completion(session.tokens, 4))
            session.tokens += completion(session.tokens, 2)
        assert source._allocator.in_use == sum(len(s.table) for s in source._states.values())


def test_a_full_pool_costs_the_session_least_recently_drafted_for_its_kv() -> None:
    engine = FakeEngine(blocks=16, block_size=4)
    source = ModelSource(engine, within_budget=False)
    a, b, c = (Session(("w", name), prompt(20, n)) for n, name in enumerate("abc"))
    for session in (a, b, a, c):  # 6 blocks each
        source.draft([wish(session)])
    assert b not in source._states
    before = engine.tokens_computed
    source.draft([wish(a, 1)])
    assert engine.tokens_computed == before + 1, "the KV of the session asked about last was gone"


def test_a_sequence_larger_than_the_pool_costs_the_others_nothing() -> None:
    source = ModelSource(FakeEngine(blocks=16, block_size=4), within_budget=False)
    small, large = Session(("w", "small"), prompt(20)), Session(("w", "large"), prompt(70))
    source.draft([wish(small)])
    assert source.draft([wish(large)]) == [[]]
    assert set(source._states) == {small}


async def test_a_fleet_whose_drafter_has_a_small_pool() -> None:
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=128, step_s=0.005), draft_depth=4, draft_wait_ms=100)
        drafter = await rig.drafter(engine=FakeEngine(blocks=16))
        client = rig.client()
        answers = await asyncio.gather(*(client.generate(token_ids=prompt(30, n), max_tokens=20) for n in range(4)))
        assert [list(a.token_ids) for a in answers] == [completion(prompt(30, n), 20) for n in range(4)]
        assert drafter.counters["drafted_model"] > 0
        assert drafter.counters["draft_errors"] == 0


# Failures


async def test_a_draft_model_that_fails_is_counted_and_tried_again_afresh() -> None:
    async with FleetRig() as rig:
        engine = FakeEngine()
        drafter = await rig.drafter(engine=engine)
        await ask(rig, item("a"), item("b"))
        engine.poison = 999
        answer = await ask(rig, item("a", [999], base=10), item("b", [1], base=10))
        assert (answer.drafts, answer.unknown) == ([], [])
        assert drafter.counters["draft_errors"] == 1
        assert model_source(drafter)._allocator.in_use == 0, "what the failed step left was kept"
        engine.poison = None
        answer = await ask(rig, item("a", [2], base=11), item("b", [2], base=11))
        assert by_session(answer) == {
            "a": completion([*prompt(10), 999, 2], 4),
            "b": completion([*prompt(10), 1, 2], 4),
        }


async def test_an_answer_that_the_bus_refuses_is_counted() -> None:
    async with FleetRig() as rig:
        drafter = await rig.drafter(engine=FakeEngine(blocks=256))
        items = [item(f"s{n}", k=64) for n in range(8)]
        rig._buses["drafter-1"][0].max_payload = 1500  # beats fit
        await rig.bus().publish(SUBJECT, encode(DraftAsk(worker="w", wait_ms=10.0, items=items)), reply="_INBOX.x")
        async with asyncio.timeout(5):
            while not drafter.counters["answers_unsent"]:
                await asyncio.sleep(0.01)
        assert set(by_session(await ask(rig, item("t")))) == {"t"}


# Sessions that are over


@pytest.mark.parametrize("source", ["model", "auto", "lookup"])
async def test_sessions_beyond_the_limit_leave_nothing_behind(source: str) -> None:
    async with FleetRig() as rig:
        drafter = await rig.drafter(draft_source=source, max_sessions=8)
        for n in range(5):
            answer = await ask(rig, *(item(f"{n}-{i}", prompt(6, i)) for i in range(40)))
            assert answer.unknown == [f"{n}-{i}" for i in range(32)]
        await asyncio.sleep(0.05)
        assert len(drafter._sessions) == 8
        for lookup in drafter._instant:
            assert isinstance(lookup, Lookup)
            assert len(lookup._grams) <= 8
        if source != "lookup":
            assert len(model_source(drafter)._states) <= 8


@pytest.mark.parametrize("source", ["model", "auto", "lookup"])
async def test_ended_sessions_are_freed_without_another_wish(source: str) -> None:
    async with FleetRig() as rig:
        drafter = await rig.drafter(draft_source=source)
        await ask(rig, item("a"), item("b", prompt(10, 1)))
        await ask(rig, ended=("a", "b"))
        await asyncio.sleep(0.05)
        assert not drafter._ended
        assert not any(lookup._grams for lookup in drafter._instant if isinstance(lookup, Lookup))
        if source != "lookup":
            assert not model_source(drafter)._states
            assert model_source(drafter)._allocator.in_use == 0


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
        assert {s.key[1] for s in model_source(drafter)._states} == {"other"}


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
            if "long" in by_session(answer):
                break
        assert by_session(answer) == {"short": completion(short, 4), "long": completion(long, 4)}


class Watched(list[int]):
    """Counts the tokens that are read from it."""

    read = 0

    def __getitem__(self, where):
        found = super().__getitem__(where)
        self.read += len(found) if isinstance(where, slice) else 1
        return found

    def __iter__(self):
        self.read += len(self)
        return super().__iter__()


@pytest.mark.parametrize("source", [Lookup(2), ModelSource(FakeEngine(blocks=600, context=2100), within_budget=True)])
def test_of_a_long_sequence_only_what_is_new_is_read(source: Lookup | ModelSource) -> None:
    """An ask costs the same however long the sequence is, also when all of it is told again after a lost answer."""
    table = SessionTable(1)
    session = table.update(("w", "s"), 0, [])
    assert session is not None
    watched = session.tokens = Watched(prompt(2000))
    for _ in range(9):
        source.draft([wish(session)])  # a model reads a long prompt in pieces
    watched.read = 0
    for _ in range(3):
        before = len(watched)
        assert table.update(("w", "s"), before, [before % 7]) is session
        if isinstance(source, ModelSource):
            source.expected_s(wish(session))
        source.draft([wish(session)])
    assert watched.read < 100

    table.update(("w", "s"), 0, list(watched))
    watched.read = 0
    assert session.tokens is watched
    source.draft([wish(session)])
    assert watched.read < 100
