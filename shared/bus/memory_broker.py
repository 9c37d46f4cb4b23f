"""What connections in memory share."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from shared.bus.base import Handler, Incoming
from shared.bus.handling import run_handler
from shared.bus.memory_stream import MemoryStream
from shared.bus.wire import matches
from shared.errors import StreamMissing

MAX_PENDING = 65_536
"""Messages that one subscription may have waiting; more are dropped and counted as `slow_consumer`."""


class Member(Protocol):
    """A connection, as the broker sees it."""

    subscriptions: list[MemorySubscription]

    @property
    def connected(self) -> bool: ...
    def disconnect(self) -> None: ...
    def reconnect(self) -> None: ...


@dataclass(eq=False)
class MemorySubscription:
    """`failed` and `dropped` are told of a handler's error and of a message that found no room."""

    subject: str
    queue: str
    handler: Handler
    failed: Callable[[BaseException], None]
    dropped: Callable[[], None]
    pending: asyncio.Queue[Incoming] = field(default_factory=lambda: asyncio.Queue(MAX_PENDING))
    task: asyncio.Task[None] | None = None
    closed: bool = False
    running: bool = False

    def offer(self, message: Incoming) -> None:
        try:
            self.pending.put_nowait(message)
        except asyncio.QueueFull:
            self.dropped()

    async def run(self) -> None:
        while not self.closed:
            message = await self.pending.get()
            self.running = True
            try:
                await run_handler(self.handler, message, self.failed)
            finally:
                self.running = False

    async def unsubscribe(self) -> None:
        """No call of the handler starts after this; one that runs may finish."""
        self.closed = True
        if self.task is not None and not self.running:
            self.task.cancel()


class MemoryBroker:
    """What the connections share: streams, subscriptions and the fault hooks. Lives on one event loop."""

    def __init__(self) -> None:
        self.streams: dict[str, MemoryStream] = {}
        self.buses: list[Member] = []
        self._changed = asyncio.Event()

    def disconnect(self) -> None:
        """Cut every connection, as when the server dies: waiting requests and pulls end with BusDisconnected."""
        for bus in self.buses:
            bus.disconnect()

    def reconnect(self) -> None:
        for bus in self.buses:
            bus.reconnect()

    def wipe_memory_streams(self) -> None:
        """Forget streams in memory with their configuration and consumers, as a restart of the server does."""
        self.streams = {name: s for name, s in self.streams.items() if s.spec.storage != "memory"}
        self.notify()

    def notify(self) -> None:
        """Wake everything that waits in `change`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, timeout: float) -> None:
        """Wait until something changed, at most `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    def stream_for(self, subject: str) -> MemoryStream | None:
        return next((s for s in self.streams.values() if s.captures(subject)), None)

    def stream(self, name: str) -> MemoryStream:
        try:
            stream = self.streams[name]
        except KeyError:
            raise StreamMissing(f"stream {name} does not exist") from None
        stream.expire(time.monotonic())
        return stream

    def route(self, message: Incoming) -> bool:
        """Give `message` to the subscriptions that match; one of each queue group. False when there is none."""
        groups: dict[str, list[MemorySubscription]] = {}
        found = False
        for bus in self.buses:
            for sub in bus.subscriptions if bus.connected else ():
                if sub.closed or not matches(sub.subject, message.subject):
                    continue
                found = True
                if sub.queue:
                    groups.setdefault(sub.queue, []).append(sub)
                else:
                    sub.offer(message)
        for members in groups.values():
            random.choice(members).offer(message)
        return found
