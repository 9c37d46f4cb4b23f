"""Second chance: blocks that are still read are written again before the stream evicts them.

The stream evicts in the order of writing, so a system prompt that everybody reads would go before a prompt that
nobody will read again. Whoever reads a block near the end of its time appends it once more under its name.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from functools import partial

from shared.bus.base import Bus, Stored
from shared.cache.index import PrefixIndex
from shared.cache.window import Window
from shared.errors import TrineError

MAX_BYTES = 32 << 20  # waiting to be written again
SPREAD_S = 1.0  # several workers read a popular block at once; the first one writes, the others see it and don't


class Refresher:
    """Writes fading frames again in the background, within the store's window. Best effort: errors are dropped."""

    def __init__(self, bus: Bus, index: PrefixIndex, window: Window, spread: float = SPREAD_S) -> None:
        self._bus = bus
        self._index = index
        self._window = window
        self._spread = spread
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0
        self.refreshed = 0

    def offer(self, block: bytes, parts: Iterable[Stored]) -> None:
        """These parts of `block` were just read and found good."""
        for stored in parts:
            size = len(stored.data)
            if self._index.fading(stored.seq) and self._bytes + size <= MAX_BYTES:
                self._bytes += size
                task = asyncio.create_task(self._write(block, stored), name="cache-refresh")
                self._tasks.add(task)
                task.add_done_callback(partial(self._done, size))

    def _done(self, size: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._bytes -= size

    async def _write(self, block: bytes, stored: Stored) -> None:
        size = len(stored.data)
        await asyncio.sleep(random.uniform(0, self._spread))
        if not self._index.fading(self._index.sequence(block)):
            return  # somebody else wrote it
        await self._window.acquire(size)
        try:
            await self._bus.append(stored.subject, stored.data, expect_last=stored.seq)
            self.refreshed += 1
        except TrineError:
            pass  # written by somebody else, evicted, or the bus is gone: nothing is lost but speed
        finally:
            self._window.release(size)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
