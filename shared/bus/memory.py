"""The bus in this process: one `MemoryBroker`, any number of `MemoryBus` connections to it.

It keeps the contract that `shared.bus.nats` keeps and can be made to fail: `disconnect`, `reconnect`, and
`wipe_memory_streams` in between for what a restart of nats-server does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import structlog

from shared.bus.base import (
    ConsumerSpec,
    Handler,
    Incoming,
    IndexHandler,
    Job,
    Stored,
    StreamSpec,
    StreamState,
    Subscription,
)
from shared.bus.block_link import BlockLink
from shared.bus.bus_link import BusLink
from shared.bus.memory_broker import MemoryBroker, MemorySubscription
from shared.bus.memory_follow import MemoryFollower
from shared.bus.memory_job import MemoryJob, handle_of
from shared.bus.memory_stream import Record
from shared.bus.wire import check_filter, check_message_id, header_bytes
from shared.errors import BusDisconnected, BusError, StreamMissing, TooLarge

__all__ = ["MemoryBroker", "MemoryBus"]

log = structlog.get_logger(__name__)

DEFAULT_MAX_PAYLOAD = (8 << 20) - 4096


class MemoryBus:
    """One connection to `broker`. Create it inside a running event loop."""

    def __init__(self, broker: MemoryBroker | None = None, *, max_payload: int = DEFAULT_MAX_PAYLOAD) -> None:
        self.broker = broker or MemoryBroker()
        self.broker.buses.append(self)
        self.max_payload = max_payload
        self.counters = {"reconnects": 0, "handler_errors": 0, "slow_consumer": 0}
        self.subscriptions: list[MemorySubscription] = []
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: set[asyncio.Future[Incoming]] = set()
        self._inboxes = itertools.count()
        self._connected = True
        self._closed = False

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def authenticated(self) -> bool:
        return self.broker.authenticated

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._callbacks.append(callback)

    def disconnect(self) -> None:
        """Cut this connection alone."""
        self._connected = False
        for future in self._waiting:
            if not future.done():
                future.set_exception(BusDisconnected("the connection was lost"))
        self.broker.notify()

    def reconnect(self) -> None:
        if self._connected or self._closed:
            return
        self._connected = True
        self.counters["reconnects"] += 1
        for callback in self._callbacks:
            self._spawn(self._call_back(callback))
        self.broker.notify()

    def link(self) -> BlockLink:
        return BusLink(self, asyncio.get_running_loop())

    async def close(self) -> None:
        self._closed = True
        self.disconnect()
        if self in self.broker.buses:
            self.broker.buses.remove(self)
        for task in list(self._tasks):
            task.cancel()
        self.subscriptions.clear()

    def require_connected(self) -> None:
        if not self._connected:
            raise BusDisconnected("the bus is closed" if self._closed else "not connected")

    def handler_failed(self, subject: str, error: BaseException) -> None:
        self.counters["handler_errors"] += 1
        log.error("bus handler failed", subject=subject, exc_info=error)

    def _dropped(self) -> None:
        self.counters["slow_consumer"] += 1

    # Core

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, reply: str = ""
    ) -> None:
        self._check(data, headers)
        await asyncio.sleep(0)
        self._send(Incoming(subject, bytes(data), reply, dict(headers or {})))

    async def request(
        self, subject: str, data: bytes, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Incoming:
        self._check(data, headers)
        answer: asyncio.Future[Incoming] = asyncio.get_running_loop().create_future()

        async def take(message: Incoming) -> None:
            if not answer.done():
                answer.set_result(message)

        self._waiting.add(answer)
        inbox = await self.subscribe(f"_INBOX.{id(self)}.{next(self._inboxes)}", take)
        try:
            if not self._send(Incoming(subject, bytes(data), inbox.subject, dict(headers or {}))):
                raise BusDisconnected(f"nobody answers on {subject}")
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise BusDisconnected(f"no answer on {subject} within {timeout:g} s") from None
        finally:
            self._waiting.discard(answer)
            await inbox.unsubscribe()

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> MemorySubscription:
        self.require_connected()
        failed = partial(self.handler_failed, subject)
        sub = MemorySubscription(subject, queue, handler, failed, self._dropped)
        self.subscriptions = [s for s in self.subscriptions if not s.closed] + [sub]
        sub.task = self._spawn(sub.run())
        return sub

    # Streams

    async def ensure_stream(self, spec: StreamSpec) -> None:
        self.require_connected()
        self.broker.ensure_stream(spec)

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        self.require_connected()
        self.broker.ensure_consumer(spec)

    async def stream_state(self, stream: str) -> StreamState:
        self.require_connected()
        return self.broker.stream(stream).state()

    async def waiting(self, stream: str, consumer: str) -> int:
        self.require_connected()
        if (source := self.broker.stream(stream).consumers.get(consumer)) is None:
            raise StreamMissing(f"consumer {consumer} of {stream} does not exist")
        return source.waiting

    async def subject_counts(self, stream: str, subject: str) -> dict[str, int]:
        self.require_connected()
        check_filter(subject)
        return self.broker.stream(stream).counts(subject)

    async def purge(self, stream: str, subject: str) -> int:
        self.require_connected()
        check_filter(subject)
        gone = self.broker.stream(stream).purge(subject)
        self.broker.notify()
        return gone

    async def stream_of(self, subject: str) -> str | None:
        self.require_connected()
        stream = self.broker.stream_for(subject)
        return stream.spec.name if stream else None

    async def append(
        self,
        subject: str,
        data: bytes | Sequence[bytes | memoryview],
        *,
        headers: Mapping[str, str] | None = None,
        expect_last: int | None = None,
        message_id: str | None = None,
        timeout: float = 5.0,
    ) -> int:
        payload = data if isinstance(data, bytes) else b"".join(data)
        self._check(payload, headers)
        check_message_id(message_id or "")
        await asyncio.sleep(0)
        self.require_connected()
        stream = self.broker.stream_for(subject)
        if stream is None:
            raise StreamMissing(f"no stream captures {subject}")
        seq = stream.append(subject, payload, headers or {}, time.monotonic(), expect_last, message_id)
        self.broker.route(Incoming(subject, payload, "", dict(headers or {})))
        self.broker.notify()
        return seq

    async def pull(self, stream: str, consumer: str, batch: int, timeout: float) -> list[Job]:
        deadline = time.monotonic() + timeout
        while True:
            self.require_connected()
            source = self.broker.stream(stream).consumers.get(consumer)
            if source is None:
                raise StreamMissing(f"consumer {consumer} of {stream} does not exist")
            now = time.monotonic()
            if taken := source.take(batch, now):
                return [
                    self.adopt(
                        stream, handle_of(source, record, delivered), record.subject, record.data, record.headers
                    )
                    for record, delivered in taken
                ]
            if now >= deadline:
                return []
            due = source.next_due()
            until = deadline if due is None or due <= now else min(deadline, due)
            await self.broker.change(until - now)

    def adopt(self, stream: str, handle: str, subject: str, data: bytes, headers: Mapping[str, str]) -> Job:
        return MemoryJob(self, stream, handle, subject, data, headers)

    async def get_many(self, stream: str, subjects: Sequence[str], timeout: float = 5.0) -> dict[str, Stored]:
        self.require_connected()
        await asyncio.sleep(0)
        if not subjects:
            return {}
        source = self.broker.stream(stream)
        found = {subject: record for subject in subjects if (record := source.last(subject))}
        return {subject: _stored(record) for subject, record in found.items()}

    async def read(
        self, stream: str, subject: str, after: int = 0, timeout: float = 5.0, limit: int | None = None
    ) -> list[Stored]:
        self.require_connected()
        await asyncio.sleep(0)
        return [_stored(record) for record in self.broker.stream(stream).on_subject(subject, after)[:limit]]

    async def follow(self, stream: str, subject: str, handler: IndexHandler) -> Subscription:
        self.require_connected()
        self.broker.stream(stream)
        follower = MemoryFollower(self, stream, subject, handler)
        follower.task = self._spawn(follower.run())
        return follower

    def _check(self, data: bytes, headers: Mapping[str, str] | None) -> None:
        self.require_connected()
        size = len(data) + header_bytes(headers)
        if size > self.max_payload:
            raise TooLarge(f"{size} bytes with headers; the bus takes at most {self.max_payload}")

    def _send(self, message: Incoming) -> bool:
        self.require_connected()
        routed = self.broker.route(message)
        if stream := self.broker.stream_for(message.subject):
            # Nobody waits for an ack, so a refusal goes unheard, as with NATS.
            with contextlib.suppress(BusError, TooLarge):
                stream.append(message.subject, message.data, message.headers, time.monotonic())
            self.broker.notify()
        return routed

    async def _call_back(self, callback: Callable[[], Awaitable[None]]) -> None:
        try:
            await callback()
        except Exception as error:
            self.handler_failed("reconnect", error)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _stored(record: Record) -> Stored:
    return Stored(record.subject, record.seq, record.data, record.headers, len(record.data))
