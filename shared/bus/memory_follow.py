"""Following a stream in memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from shared.bus.base import IndexHandler, Stored
from shared.bus.memory_broker import Member
from shared.bus.memory_stream import MemoryStream
from shared.bus.wire import matches


@dataclass(eq=False)
class MemoryFollower:
    """Hands the messages of `stream` on `subject` to `handler`; `run` is its task's work."""

    bus: Member
    stream: str
    subject: str
    handler: IndexHandler
    task: asyncio.Task[None] | None = None
    _generation: int = 0
    _seq: int = 0

    async def run(self) -> None:
        while True:
            stream = self.bus.broker.streams.get(self.stream)
            if stream is not None and self.bus.connected:
                self._feed(stream)
            await self.bus.broker.change(1.0)

    def _feed(self, stream: MemoryStream) -> None:
        if stream.generation != self._generation:
            self._generation, self._seq = stream.generation, 0
        for record in stream.after(self._seq):
            self._seq = record.seq
            if not matches(self.subject, record.subject):
                continue
            try:
                self.handler(Stored(record.subject, record.seq, b"", record.headers, len(record.data)))
            except Exception as error:
                self.bus.handler_failed(self.subject, error)

    async def unsubscribe(self) -> None:
        if self.task is not None:
            self.task.cancel()
