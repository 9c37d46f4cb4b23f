"""Drafts that the model cannot bear, and idle steps: neither costs an answer, or what was learned of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from services.decode.scheduler import DecodeScheduler
from services.decode.sequence import Sequence as Generation
from services.decode.steps import Steps
from shared.cache.blocks import BlockAllocator
from shared.cache.naming import Lineage
from shared.engine.base import BadSpans, Sampled
from shared.engine.span import Span
from shared.errors import TrineError
from shared.messages import Sampling
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
        assert known.trip.seen > 0
        await rig.client().generate(token_ids=[6] * 30, max_tokens=4)
        assert worker._drafting.book._drafters["drafter-1"] is known
