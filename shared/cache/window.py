"""A bound on what is in flight: so many operations and so many bytes at once."""

from __future__ import annotations

import asyncio
from collections import deque


class Window:
    """`acquire` waits its turn, first come first served; every acquire needs one `release` of the same size.

    A single operation larger than `max_bytes` passes when nothing else is in flight. Used from one event loop.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self.count = 0
        self.bytes = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    def _fits(self, size: int) -> bool:
        return self.count == 0 or (self.count < self._max_count and self.bytes + size <= self._max_bytes)

    def _take(self, size: int) -> None:
        self.count += 1
        self.bytes += size

    async def acquire(self, size: int) -> None:
        if not self._queue and self._fits(size):
            self._take(size)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size)  # our turn came in the moment we were cancelled
            else:
                self._queue.remove((size, turn))
                self._admit()
            raise

    def release(self, size: int) -> None:
        self.count -= 1
        self.bytes -= size
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._fits(self._queue[0][0]):
            size, turn = self._queue.popleft()
            self._take(size)
            turn.set_result(None)
