"""An actor that works off a queue: it holds the jobs it has taken, and drops what is cancelled."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable

import anyio

from shared.actor import Actor
from shared.bus.base import Bus, Incoming, Job
from shared.bus.settle import settle
from shared.cancels import Cancels
from shared.config import Settings
from shared.subjects import cancelled_of
from shared.tenants import request_key


class JobActor(Actor):
    """Subclasses call `super().setup()` and add `super().side_tasks()` to their own."""

    def __init__(self, settings: Settings, bus: Bus, worker: str) -> None:
        super().__init__(settings, bus, worker)
        self.cancels = Cancels()

    # What subclasses provide

    def held(self) -> Iterable[Job]:
        """Jobs that nobody else should get yet."""
        return ()

    async def cancel(self, key: str) -> None:
        """Drop what is being done for this request (`request_key`), if anything is. Later ones `cancels` knows of."""

    # Life

    async def setup(self) -> None:
        await self.bus.subscribe(self.subjects.cancels, self._on_cancel)

    def side_tasks(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {"holds": self._hold}

    async def _on_cancel(self, message: Incoming) -> None:
        try:
            key = request_key(*cancelled_of(message.subject))
            if message.data:
                # The reply subject of a publish is not subject to permissions: with another's cancel there, the
                # server's ack would come here.
                raise ValueError("a cancel is empty")
        except ValueError:  # anybody may publish here
            self.counters["bad_messages"] += 1
            return
        self.cancels.note(key, time.monotonic())
        await self.cancel(key)

    async def _hold(self) -> None:
        while True:
            await anyio.sleep(self.settings.ack_wait_s / 3)
            for job in list(self.held()):
                await settle(job.hold())
