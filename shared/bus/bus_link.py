"""`BlockLink` over any `Bus`: what is written for threads works on a bus in memory too."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from shared.bus.base import Bus, Stored
from shared.bus.block_link import WINDOW_COUNT, Item, Receive
from shared.errors import BusDisconnected, FrameError, TrineError

GRACE_S = 1.0
"""How much longer than the deadline the event loop may take to say so."""
T = TypeVar("T")


class BytesReader:
    """A payload that is in memory already."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.left = len(data)

    def exactly(self, count: int) -> bytes:
        return bytes(self._take(count))

    def into(self, place: memoryview) -> None:
        if place.nbytes:
            place.cast("B")[:] = self._take(place.nbytes)

    def _take(self, count: int) -> memoryview:
        if not 0 <= count <= self.left:
            raise FrameError(f"{count} bytes of a message that has {self.left} left")
        start = len(self._data) - self.left
        self.left -= count
        return self._data[start : start + count]


class BusLink:
    """`loop` is the one that runs `bus`; the caller is another thread. `close` leaves the bus open."""

    def __init__(self, bus: Bus, loop: asyncio.AbstractEventLoop) -> None:
        self._bus = bus
        self._loop = loop
        self._closed = False
        self._waiting: concurrent.futures.Future[Any] | None = None

    def put(self, items: Sequence[Item], deadline: float) -> list[int | TrineError]:
        try:
            return self._wait(lambda: self._put(items, deadline), deadline)
        except BusDisconnected as error:
            return [error] * len(items)

    def get(self, stream: str, subjects: Sequence[str], receive: Receive, deadline: float) -> None:
        found = self._wait(lambda: self._get(stream, subjects, deadline), deadline)
        for message in sorted(found.values(), key=lambda message: message.seq):
            with suppress(FrameError):
                receive(message.subject, message.seq, len(message.data), BytesReader(message.data))

    def close(self) -> None:
        self._closed = True
        if (waiting := self._waiting) is not None:
            waiting.cancel()

    async def _get(self, stream: str, subjects: Sequence[str], deadline: float) -> dict[str, Stored]:
        # Not `wait_for`: up to Python 3.11 it hides a cancellation behind an error that nobody asks for any more.
        left = deadline - time.monotonic()
        async with asyncio.timeout(left):
            return await self._bus.get_many(stream, subjects, timeout=left)

    async def _put(self, items: Sequence[Item], deadline: float) -> list[int | TrineError]:
        window = asyncio.Semaphore(WINDOW_COUNT)

        async def one(item: Item) -> int | TrineError:
            try:
                async with asyncio.timeout(deadline - time.monotonic()), window:
                    left = deadline - time.monotonic()
                    return await self._bus.append(item.subject, item.parts, expect_last=item.expect_last, timeout=left)
            except TimeoutError:
                return BusDisconnected(f"no answer on {item.subject} in time")
            except TrineError as error:
                return error

        return await asyncio.gather(*(one(item) for item in items))

    def _wait(self, work: Callable[[], Coroutine[Any, Any, T]], deadline: float) -> T:
        left = deadline - time.monotonic()
        if self._closed or left <= 0 or self._loop.is_closed():
            raise BusDisconnected("the link is closed" if self._closed else "no time left")
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        self._waiting = future
        try:
            return future.result(left + GRACE_S)
        except (TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            raise BusDisconnected("no answer in time") from None
