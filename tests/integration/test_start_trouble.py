"""Workers whose connection is lost while they start: they begin to serve when it is back, and none ends."""

from __future__ import annotations

from collections import Counter

import pytest

from shared.bus import listening
from shared.bus.base import Handler, Subscription
from shared.bus.memory import MemoryBus
from shared.errors import BusDisconnected
from tests.fleet_rig import FleetRig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]


async def test_a_connection_that_is_lost_before_any_subscription_ends_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: Counter[tuple[MemoryBus, str]] = Counter()
    subscribe = MemoryBus.subscribe

    async def lost_at_first(self: MemoryBus, subject: str, handler: Handler, queue: str = "") -> Subscription:
        tries[self, subject] += 1
        if tries[self, subject] == 1 and not subject.startswith("_INBOX"):
            raise BusDisconnected("not connected to NATS")
        return await subscribe(self, subject, handler, queue)

    monkeypatch.setattr(listening, "RETRY_S", 0.001)
    monkeypatch.setattr("shared.actor.RETRY_S", 0.001)
    async with FleetRig() as fleet:
        monkeypatch.setattr(MemoryBus, "subscribe", lost_at_first)
        await fleet.drafter()
        await fleet.prefill()
        await fleet.decode()
        monkeypatch.setattr(MemoryBus, "subscribe", subscribe)
        answer = await fleet.client().generate(token_ids=list(range(1, 20)), max_tokens=4, temperature=0.0)
        assert answer.usage.completion_tokens == 4
    assert len(tries) >= 12 and set(tries.values()) == {2}
