"""Second chance: blocks that are still read are written again before the stream evicts them.

The stream evicts in the order of writing, so a system prompt that everybody reads would go before a prompt that
nobody will read again. Whoever reads a block near the end of its time appends it once more under its name.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shared.bus.block_link import BlockLink, Item
from shared.cache import frames
from shared.cache.frames import BlockMeta
from shared.cache.index import PrefixIndex
from shared.cache.lane import Lane
from shared.messages import Identity
from shared.subjects import Subjects

MAX_BYTES = 32 << 20  # waiting to be written again
SPREAD_S = 1.0  # several workers read a popular block at once; the first one writes, the others see it and don't
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Fading:
    meta: BlockMeta
    payload: bytes
    sequences: dict[int, int]
    """Of the parts that fade."""


class Refresher:
    """Writes fading blocks again in the background, in its turn on the lane. Best effort: errors are dropped."""

    def __init__(
        self,
        lane: Lane,
        index: PrefixIndex,
        subjects: Subjects,
        identity: Identity,
        part_bytes: int,
        spread: float = SPREAD_S,
    ) -> None:
        self._lane = lane
        self._index = index
        self._subjects = subjects
        self._identity = identity
        self._part_bytes = part_bytes
        self._spread = spread
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0
        self.refreshed = 0

    def offer(self, meta: BlockMeta, payload: memoryview, sequences: Sequence[int]) -> None:
        """This block was just read and found good; its parts have these sequences. The payload may change later."""
        fading = {part: seq for part, seq in enumerate(sequences) if self._index.fading(seq)}
        if fading and self._bytes + payload.nbytes <= MAX_BYTES:
            self._bytes += payload.nbytes
            task = asyncio.create_task(self._write(_Fading(meta, bytes(payload), fading)), name="cache-refresh")
            self._tasks.add(task)
            task.add_done_callback(partial(self._done, payload.nbytes))

    def _done(self, size: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._bytes -= size

    async def _write(self, block: _Fading) -> None:
        await asyncio.sleep(random.uniform(0, self._spread))
        if self._index.fading(self._index.sequence(block.meta.name)):  # else somebody else wrote it
            deadline = time.monotonic() + TIMEOUT_S  # its turn included: others wait behind it
            self.refreshed += await self._lane.run(partial(self._put, block, deadline))

    def _put(self, block: _Fading, deadline: float, link: BlockLink) -> int:
        """Blocking. Numbers of parts written; the others were written by somebody else, or the bus is gone."""
        parts = frames.encode(block.meta, memoryview(block.payload), self._identity, self._part_bytes)
        items = [
            Item(self._subjects.block(block.meta.name, part, block.meta.scope), parts[part], sequence)
            for part, sequence in block.sequences.items()
        ]
        return sum(isinstance(result, int) for result in link.put(items, deadline))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
