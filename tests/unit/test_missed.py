"""Who may not read the event stream asks a worker: it learns that from the first refusal, for as long as it counts."""

from __future__ import annotations

from typing import Any

import pytest

from shared.bus.base import Incoming
from shared.bus.memory import MemoryBus
from shared.bus.memory_broker import MemoryBroker
from shared.codec import encode
from shared.errors import PermissionDenied
from shared.messages import Missed, MissedEvent
from shared.subjects import Subjects
from trine.missed import stored_events

pytestmark = pytest.mark.anyio


class Denied(MemoryBus):
    tries = 0

    async def read(self, *args: Any, **options: Any) -> Any:
        self.tries += 1
        raise PermissionDenied("not yours")


async def test_one_try_for_each_connection_and_stream() -> None:
    broker = MemoryBroker()
    bus, worker = Denied(broker), MemoryBus(broker)

    async def answer(message: Incoming) -> None:
        event = MissedEvent(seq=3, request="1", data=b"x")
        await worker.publish(message.reply, encode(Missed(events=[event], more=False)))

    async def ask(model: str) -> None:
        found = await stored_events(bus, Subjects(model), "r", "acme", 2, 1.0)
        assert [(event.seq, event.data) for event in found] == [(3, b"x")]

    for model in ("one", "two"):
        await worker.subscribe(Subjects(model).agains, answer)
    for _ in range(3):
        await ask("one")
    assert bus.tries == 1
    await ask("two")
    assert bus.tries == 2
    bus.disconnect()
    bus.reconnect()
    await ask("one")
    await ask("one")
    assert bus.tries == 3
