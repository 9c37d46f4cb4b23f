"""Jobs in memory: pulled here, or adopted from another connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from shared.bus.ack import parse_handle
from shared.bus.memory_broker import Member
from shared.bus.memory_stream import MemoryConsumer, Record
from shared.errors import InvalidField, StreamMissing


class MemoryJob:
    """A delivery, which `handle` names. Raises InvalidField when the broker has no such consumer."""

    def __init__(
        self, bus: Member, stream: str, handle: str, subject: str, data: bytes, headers: Mapping[str, str]
    ) -> None:
        ack = parse_handle(stream, handle)
        self.handle = handle
        self.subject = subject
        self.data = data
        self.headers = headers
        self.seq = ack.seq
        self.delivered = ack.delivered
        self.stamp = ack.stamp
        self.age = max(0.0, time.monotonic() - ack.stamp / 1e9)
        self._bus = bus
        self._consumer = _consumer(bus, stream, ack.consumer)

    async def ack(self) -> None:
        self._tell(lambda: self._consumer.done(self.seq))

    async def nak(self, delay: float = 0.0) -> None:
        self._tell(lambda: self._consumer.again(self.seq, time.monotonic() + delay))

    async def term(self) -> None:
        self._tell(lambda: self._consumer.done(self.seq))

    async def hold(self) -> None:
        self._tell(lambda: self._consumer.again(self.seq, time.monotonic() + self._consumer.spec.ack_wait))

    def _tell(self, change: Callable[[], None]) -> None:
        self._bus.require_connected()
        change()
        self._bus.broker.notify()


def handle_of(consumer: MemoryConsumer, record: Record, delivered: int) -> str:
    """A handle as JetStream spells it; the consumer's own numbers, which nobody asks for, are left at 0."""
    spec = consumer.spec
    return f"$JS.ACK.{spec.stream}.{spec.name}.{delivered}.{record.seq}.0.{round(record.stored * 1e9)}.0"


def _consumer(bus: Member, stream: str, name: str) -> MemoryConsumer:
    try:
        return bus.broker.stream(stream).consumers[name]
    except (StreamMissing, KeyError):
        raise InvalidField(f"handle: stream {stream} has no consumer {name}", field="handle") from None
