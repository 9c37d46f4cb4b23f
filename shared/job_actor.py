"""An actor that works off a queue: it holds the jobs it has taken, and drops what is cancelled."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import anyio

from shared.actor import Actor
from shared.bus.base import Bus, Incoming, Job
from shared.bus.listening import listen
from shared.bus.settle import settle
from shared.cancels import Cancels
from shared.config import Settings
from shared.errors import BusError
from shared.subjects import cancelled_of
from shared.tenants import request_key

LOOKED = 1.5
"""In so many beats' time, one beat at least goes out."""


class JobActor(Actor):
    """Subclasses call `super().setup()` and add `super().side_tasks()` to their own."""

    def __init__(self, settings: Settings, bus: Bus, worker: str) -> None:
        super().__init__(settings, bus, worker)
        self.cancels = Cancels()
        self._queued: dict[str, int] = {}
        self._looked = float("-inf")

    # What subclasses provide

    def held(self) -> Iterable[Job]:
        """Jobs that nobody else should get yet."""
        return ()

    async def cancel(self, key: str) -> None:
        """Drop what is being done for this request (`request_key`), if anything is. Later ones `cancels` knows of."""

    # Life

    async def setup(self) -> None:
        await listen(self.bus, self.subjects.cancels, self._on_cancel)

    def side_tasks(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {"holds": self._hold, "queues": self._watch_queues}

    @property
    def queued(self) -> dict[str, int]:
        """For the beat: what waits in the queues that this worker works off, if they were just looked at."""
        return self._queued if time.monotonic() - self._looked < LOOKED * self.settings.beat_s else {}

    async def _watch_queues(self) -> None:
        """Together, the workers of a role look once in the time of a beat."""
        while True:
            peers = len(self.peers.alive(self.role, time.monotonic()))
            await anyio.sleep(self.settings.beat_s * (1 + peers))
            with suppress(BusError):  # whoever works off a queue finds out what is wrong with it
                self._queued = {c.name: await self.bus.waiting(c.stream, c.name) for c in self.consumers()}
                self._looked = time.monotonic()

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
