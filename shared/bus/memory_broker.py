"""What connections in memory share."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from shared.bus.base import ConsumerSpec, Handler, Incoming, StreamSpec
from shared.bus.handling import run_handler
from shared.bus.memory_stream import MemoryConsumer, MemoryStream
from shared.bus.wire import matches, overlaps
from shared.errors import ConfigError, StreamMissing

MAX_PENDING = 65_536
"""Messages that one subscription may have waiting; more are dropped and counted as `slow_consumer`."""


class Member(Protocol):
    """A connection, as the broker sees it."""

    broker: MemoryBroker
    subscriptions: list[MemorySubscription]

    @property
    def connected(self) -> bool: ...
    def require_connected(self) -> None: ...
    def handler_failed(self, subject: str, error: BaseException) -> None: ...
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
    """What the connections share: streams, subscriptions and the fault hooks. Lives on one event loop.

    `authenticated` is what its connections say of themselves.
    """

    def __init__(self, *, authenticated: bool = False) -> None:
        self.authenticated = authenticated
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

    def ensure_stream(self, spec: StreamSpec) -> None:
        """Raises ConfigError."""
        if stream := self.streams.get(spec.name):
            _compare(f"stream {spec.name}", stream.spec, spec)
            return
        for other in self.streams.values():
            if _overlap(other.spec.subjects, spec.subjects):
                raise ConfigError(f"stream {spec.name}: subjects overlap with those of stream {other.spec.name}")
        self.streams[spec.name] = MemoryStream(spec)
        self.notify()

    def ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Raises ConfigError, StreamMissing."""
        stream = self.stream(spec.stream)
        what = f"consumer {spec.name} of {spec.stream}"
        if consumer := stream.consumers.get(spec.name):
            _compare(what, consumer.spec, spec)
            return
        filters = spec.filter_subjects
        if any(overlaps(a, b) for a, b in itertools.combinations(filters, 2)):
            raise ConfigError(f"{what}: its filters overlap")
        for other in stream.consumers.values():
            if stream.spec.retention == "workqueue" and _overlap(other.spec.filter_subjects, filters):
                raise ConfigError(f"{what}: filter overlaps with {other.spec.name}")
        stream.consumers[spec.name] = MemoryConsumer(spec, stream)

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


def _overlap(some: Iterable[str], others: Iterable[str]) -> bool:
    return any(overlaps(a, b) for a, b in itertools.product(some, others))


def _compare(what: str, found: StreamSpec | ConsumerSpec, expected: StreamSpec | ConsumerSpec) -> None:
    def same(a: Any, b: Any) -> bool:
        return sorted(a) == sorted(b) if isinstance(a, tuple) else bool(a == b)

    names = [f.name for f in fields(expected) if not same(getattr(found, f.name), getattr(expected, f.name))]
    if names:
        differences = (f"{n} is {getattr(found, n)}, expected {getattr(expected, n)}" for n in names)
        raise ConfigError(f"{what} exists with another configuration: {'; '.join(differences)}")
