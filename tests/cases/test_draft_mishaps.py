"""Drafts that the model cannot bear, and idle steps: neither costs an answer, or what was learned of a drafter."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from services.decode.scheduler import DecodeScheduler
from services.decode.sequence import Sequence as Generation
from services.decode.steps import Steps
from services.drafter.sessions import Session, SessionTable
from shared.cache.blocks import BlockAllocator
from shared.cache.naming import Lineage
from shared.engine.base import BadSpans, Sampled
from shared.engine.span import Span
from shared.errors import TrineError
from shared.messages import DraftItem, Sampling
from shared.telemetry import Counters
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import FleetRig

pytestmark = pytest.mark.anyio
UNBEARABLE = 999


class Fragile(FakeEngine):
    """Its output is unusable for spans with one token."""

    def sample(self, spans: Sequence[Span]) -> list[Sampled]:
        if bad := tuple(i for i, span in enumerate(spans) if UNBEARABLE in span.token_ids):
            raise BadSpans(bad)
        return super().sample(spans)


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_a_draft_that_the_model_cannot_bear_fails_nobody(names: str) -> None:
    failed: list[TrineError] = []

    async def in_engine(function: Callable[..., Any], *args: object) -> Any:
        return function(*args)

    scheduler = DecodeScheduler(BlockAllocator(64, 4), block_size=4, context_length=512, max_running=4, step_tokens=64)
    steps = Steps(Fragile(), scheduler, in_engine, lambda _, e: failed.append(e), Counters(), lambda *_: None)
    prompt = [1, 2, 3]
    for name in names:
        scheduler.submit(Generation(name, list(prompt), 3, Lineage(b"r" * 32, "default"), 6, Sampling(), 7))
    for sequence in scheduler.admit():
        scheduler.loaded(sequence)
    told: dict[str, list[int]] = {name: [] for name in names}
    for number in range(6):
        for sequence in scheduler.live():
            if sequence.id == "a" and number == 2:
                sequence.drafts = (UNBEARABLE, 5)
        for outcome in await steps.run(scheduler.plan()):
            told[outcome.sequence.id] += outcome.tokens
    assert failed == []
    assert all(tokens == completion(prompt, 6) for tokens in told.values())


async def test_what_was_learned_of_a_drafter_outlives_the_request() -> None:
    async with FleetRig() as rig:
        worker = await rig.decode(draft_adaptive=False, draft_depth=4, draft_wait_ms=200)
        await rig.drafter()
        await rig.client().generate(token_ids=[5] * 30, max_tokens=20)
        await rig.quiet()
        known = worker._drafting.book._drafters["drafter-1"]
        assert known.heard > 0
        await rig.client().generate(token_ids=[6] * 30, max_tokens=4)
        assert worker._drafting.book._drafters["drafter-1"] is known


async def test_a_prompt_that_no_ask_has_room_for_is_drafted_for_by_nobody_and_disturbs_nobody() -> None:
    async with FleetRig() as rig:
        worker = await rig.decode(engine=FakeEngine(blocks=400, context=1500), draft_adaptive=False, draft_wait_ms=200)
        await rig.drafter(draft_source="suffix")
        rig._buses["decode-1"][0].max_payload = 2500  # of the one for control messages
        client, long = rig.client(), [700 + n % 7 for n in range(1000)]
        answer = await client.generate(token_ids=long, max_tokens=60)
        assert list(answer.token_ids) == completion(long, 60)
        assert answer.usage.drafted_tokens == 0
        assert worker.counters["asks_unsent"] == 1
        assert worker.counters["drafts_lost"] == 0
        answer = await client.generate(token_ids=[5, 6] * 10, max_tokens=20)
        assert answer.usage.drafted_tokens > 0


async def test_a_full_drafter_is_told_each_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has no room for is not sent with every step."""
    told = Counter[str]()

    def update(table: SessionTable, worker: str, item: DraftItem, now: float) -> Session | None:
        told[item.session] += item.base == 0
        return original(table, worker, item, now)

    original = SessionTable.update
    monkeypatch.setattr(SessionTable, "update", update)
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=400), draft_adaptive=False, draft_wait_ms=200)
        await rig.drafter(draft_source="suffix", session_tokens=250)
        prompts = [[n] * 100 for n in range(4)]
        client = rig.client()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.generate(token_ids=p, max_tokens=40)) for p in prompts]
        assert [list(t.result().token_ids) for t in tasks] == [completion(p, 40) for p in prompts]
        drafted = [t.result().usage.drafted_tokens > 0 for t in tasks]
        assert drafted.count(True) == 1
        assert list(told.values()) == [1] * 4
