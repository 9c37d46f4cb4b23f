"""Tells clients that found the queue full when to ask again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import anyio
import structlog

from services.decode.outflow import Outflow
from shared.bus.base import Bus, Incoming
from shared.bus.listening import listen
from shared.bus.wire import INBOX
from shared.codec import encode
from shared.errors import BusError
from shared.messages import Room
from shared.subjects import Subjects
from shared.telemetry import Counters

QUEUE = "trine-room"  # one worker of the fleet answers
LOOK_S = 1.0
FRESH_S = 0.2
"""A look at the queue that is older is not answered from."""

log = structlog.get_logger()


class Rooms:
    """`busy`: whether requests are being served here; `askers`: how many workers answer as this one does."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        capacity: int,
        counters: Counters,
        *,
        busy: Callable[[], bool],
        askers: Callable[[], int],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._capacity = capacity
        self._counters = counters
        self._busy = busy
        self._askers = askers
        self._outflow = Outflow(capacity)
        self._looked = float("-inf")
        self._there = 0

    async def start(self) -> None:
        await listen(self._bus, self._subjects.room, self._on_ask, queue=QUEUE)

    async def watch(self) -> None:
        """Look at the queue now and then while it moves, so that its rate is known when somebody asks."""
        while True:
            await anyio.sleep(LOOK_S)
            if self._busy():
                await self._look()

    async def _look(self) -> None:
        try:
            state = await self._bus.stream_state(self._subjects.request_stream)
        except BusError as error:
            log.debug("the queue was not looked at", error=str(error))
            return
        self._looked, self._there = time.monotonic(), state.messages
        self._outflow.look(self._looked, state.last_seq, state.messages)

    async def _on_ask(self, message: Incoming) -> None:
        if not message.reply.startswith(INBOX):  # it would be published there with this worker's rights
            self._counters["bad_messages"] += 1
            return
        if time.monotonic() - self._looked > FRESH_S:
            await self._look()
        self._counters["told_to_wait"] += 1
        wait = self._outflow.wait(time.monotonic(), self._askers())
        told = Room(queued=self._there, capacity=self._capacity, retry_ms=math.ceil(wait * 1e3))
        try:
            await self._bus.publish(message.reply, encode(told))
        except BusError as error:
            log.debug("nobody was told when to ask again", error=str(error))
