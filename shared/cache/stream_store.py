"""The shared prefix cache on a JetStream stream, over links of its own: bulk bytes would delay control messages."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from shared.bus.base import Bus
from shared.bus.block_link import BlockLink, Item
from shared.cache import frames
from shared.cache.frames import BlockMeta
from shared.cache.index import PrefixIndex
from shared.cache.lane import Lane, in_thread
from shared.cache.page import Page
from shared.cache.refresh import Refresher
from shared.cache.store import Fetched, PutReport
from shared.errors import ConfigError, SequenceConflict
from shared.messages import Identity
from shared.subjects import Subjects

BATCH_BYTES = 4 << 20  # hashed while the batch before is on the wire
PAGE_BYTES = 8 << 20  # of one batched get; well below the server's max_pending
MAX_BATCH = 64
ERROR_PAUSE_S = 0.05  # so that a caller that asks again and again does not spin while the bus is away
MAX_DAMAGED = 1024
T = TypeVar("T")
COUNTERS = ("hit", "miss", "reject", "put", "exists", "put_failed", "bytes_in", "bytes_out")


@dataclass(slots=True, eq=False)
class _Put:
    """A block on its way, and what became of its parts; `left` of them are not answered yet."""

    meta: BlockMeta
    payload: memoryview
    left: int
    sent: int = 0
    """Bytes that were not there before."""
    failed: bool = False


class StreamBlockStore:
    """`BlockStore` on the stream of `block_stream`.

    Raises ConfigError when blocks do not fit the bus, or the index counts other parts than the store cuts.
    """

    def __init__(self, bus: Bus, subjects: Subjects, identity: Identity, index: PrefixIndex) -> None:
        frames.check_identity(identity)
        self._subjects = subjects
        self._identity = identity
        self._index = index
        self._part_bytes = frames.part_bytes_for(bus.max_payload, identity)
        self._parts = frames.part_count(identity.block_bytes, self._part_bytes)
        if index.parts != self._parts:
            raise ConfigError(f"blocks have {self._parts} parts under this max_payload, the index counts {index.parts}")
        self._puts, self._gets = Lane(bus), Lane(bus)
        self._refresher = Refresher(self._puts, index, subjects, identity, self._part_bytes)
        self._damaged: dict[tuple[bytes, int], int] = {}
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    @property
    def counters(self) -> Mapping[str, int]:
        return {**self._counters, "refreshed": self._refresher.refreshed}

    async def close(self) -> None:
        for lane in (self._puts, self._gets):
            lane.close()
        await self._refresher.close()

    def _batches(self, items: Sequence[T], nbytes: int) -> Iterator[Sequence[T]]:
        """Blocks, or things of one block each, in runs of about `nbytes` bytes of payload."""
        size = min(MAX_BATCH, max(1, nbytes // self._identity.block_bytes))
        return (items[start : start + size] for start in range(0, len(items), size))

    # Put

    async def put(self, blocks: Sequence[tuple[BlockMeta, memoryview]], timeout: float = 10.0) -> PutReport:
        for meta, payload in blocks:
            frames.check_block(meta, payload.nbytes, self._identity)
        deadline = time.monotonic() + timeout
        wanted = [_Put(m, payload, self._parts) for m, payload in blocks if not self._index.present(m.name)]
        for batch in self._batches(wanted, BATCH_BYTES):
            await self._puts.run(partial(self._put_batch, batch, self._expected(batch), deadline))
            if any(put.failed for put in batch):
                break  # the bus is in trouble; the rest would only wait for it too
        failed = sum(put.failed or put.left > 0 for put in wanted)
        stored = sum(put.sent > 0 and not put.failed and put.left == 0 for put in wanted)
        existed = len(blocks) - stored - failed
        self._counters.update(put=stored, exists=existed, put_failed=failed, bytes_out=sum(put.sent for put in wanted))
        return PutReport(stored, existed, failed)

    def _expected(self, batch: Sequence[_Put]) -> dict[tuple[bytes, int], int]:
        """Put if absent; a part that we saw damaged is replaced, if it is still the same one."""
        parts = [(put.meta.name, part) for put in batch for part in range(self._parts)]
        return {part: self._damaged.pop(part, 0) for part in parts}

    def _put_batch(
        self, batch: Sequence[_Put], expected: Mapping[tuple[bytes, int], int], deadline: float, link: BlockLink
    ) -> None:
        """Blocking, in a thread."""
        left = [
            (put, Item(self._subjects.block(put.meta.name, part, put.meta.scope), frame, expected[put.meta.name, part]))
            for put in batch
            for part, frame in enumerate(frames.encode(put.meta, put.payload, self._identity, self._part_bytes))
        ]
        while left:
            results = link.put([item for _, item in left], deadline)
            again: list[tuple[_Put, Item]] = []
            for (put, item), result in zip(left, results, strict=True):
                if isinstance(result, SequenceConflict) and item.expect_last:
                    again.append((put, replace(item, expect_last=0)))  # the damaged one has left
                elif isinstance(result, int | SequenceConflict):  # a conflict: somebody else's is there
                    put.left -= 1
                    put.sent += len(item.parts[1]) if isinstance(result, int) else 0
                else:
                    put.failed = True
            left = again

    # Get

    async def get(
        self, blocks: Sequence[BlockMeta], timeout: float = 5.0, places: Sequence[memoryview] | None = None
    ) -> Fetched:
        fetched = Fetched()
        if places is None:
            places = [memoryview(bytearray(self._identity.block_bytes)) for _ in blocks]
        asked = {meta.name: (meta, place.cast("B")) for meta, place in zip(blocks, places, strict=True)}
        deadline = time.monotonic() + timeout
        async with asyncio.TaskGroup() as group:
            for batch in self._batches(list(asked.values()), PAGE_BYTES):
                group.create_task(self._get_page(batch, fetched, deadline))
        self._counters.update(hit=len(fetched), miss=len(asked) - len(fetched))
        self._counters["bytes_in"] += len(fetched) * self._identity.block_bytes
        return fetched

    async def _get_page(self, batch: Sequence[tuple[BlockMeta, memoryview]], fetched: Fetched, deadline: float) -> None:
        told = {meta.name: self._index.sequence(meta.name) for meta, _ in batch}
        page = Page(batch, self._subjects, self._identity, self._part_bytes)
        await self._gets.run(lambda link: page.receive(link, deadline))
        await in_thread(page.check)  # while the next one arrives
        for meta, place in batch:
            if (whole := page.whole.get(meta.name)) is not None:
                fetched[meta.name] = place
                fetched.producers.add(whole.producer)
                self._refresher.offer(replace(meta, producer=whole.producer), place, whole.sequences)
        self._note_damage(page)
        for name in page.gone:
            if self._index.sequence(name) == told[name]:  # else the feed told of a newer one meanwhile
                self._index.forget(name)
        if page.failed:
            await asyncio.sleep(ERROR_PAUSE_S)

    def _note_damage(self, page: Page) -> None:
        self._counters["reject"] += len({name for name, _ in page.damaged})
        self._damaged.update(page.damaged)
        while len(self._damaged) > MAX_DAMAGED:
            del self._damaged[next(iter(self._damaged))]
