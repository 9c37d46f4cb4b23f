"""The shared prefix cache as its users see it, and its implementation on a JetStream stream.

A miss is always an answer: missing, late, evicted, damaged, bus down. Whoever misses recomputes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from shared.bus.base import Bus, Stored, StreamSpec
from shared.cache import frames
from shared.cache.frames import BlockMeta
from shared.cache.index import PrefixIndex
from shared.cache.refresh import Refresher
from shared.cache.window import Window
from shared.errors import ConfigError, FrameError, SequenceConflict, TrineError
from shared.messages import Identity
from shared.subjects import Subjects

WINDOW_COUNT = 16  # acks in flight; more overrun the server's ingest queue
WINDOW_BYTES = 32 << 20
HASH_BYTES = 1 << 20  # of one trip to a thread: small blocks share it, large ones go to the wire one by one
PAGE_BYTES = 8 << 20  # of one batched get; well below the server's max_pending
MAX_BATCH = 64  # blocks; bounds what a page takes in memory when somebody stored frames far larger than our blocks
PAGES = 2  # gets in flight: one arrives while the other is verified
ERROR_PAUSE_S = 0.05  # so that a caller that asks again and again does not spin while the bus is away
MAX_DAMAGED = 1024
NATS_HEADERS = 4 << 10
T = TypeVar("T")
COUNTERS = ("hit", "miss", "reject", "put", "exists", "put_failed", "bytes_in", "bytes_out")


@dataclass(frozen=True, slots=True)
class PutReport:
    """Numbers of blocks. What failed is not in the cache; nothing else follows from it."""

    stored: int = 0
    existed: int = 0
    failed: int = 0


class Fetched(dict[bytes, memoryview]):
    """Payloads by block name, each verified; `producers` are the workers that computed them."""

    def __init__(self) -> None:
        super().__init__()
        self.producers: set[str] = set()


class BlockStore(Protocol):
    """Blocks by name.

    Counters: hit + miss = blocks asked for, reject = damaged or foreign ones among the misses; put + exists +
    put_failed = blocks offered; bytes_in and bytes_out count payload bytes; refreshed = parts written again.
    """

    @property
    def counters(self) -> Mapping[str, int]: ...

    async def put(self, blocks: Sequence[tuple[BlockMeta, memoryview]], timeout: float = 10.0) -> PutReport:
        """Store what is not there yet. Payloads must not change until it returns.

        Raises FrameError for a payload that contradicts the identity (a bug here), nothing for trouble elsewhere.
        """
        ...

    async def get(self, blocks: Sequence[BlockMeta], timeout: float = 5.0) -> Fetched:
        """Those of `blocks` that could be had in time and are exactly what was asked for; raises nothing.

        All payloads are in memory at once: ask for as many as you have room for.
        """
        ...

    async def close(self) -> None: ...


def block_stream(subjects: Subjects, max_bytes: int) -> StreamSpec:
    """The cache's stream: in memory, one message per part, the oldest evicted beyond `max_bytes`."""
    return StreamSpec(
        name=subjects.block_stream,
        subjects=(subjects.blocks,),
        storage="memory",
        discard="old",
        max_bytes=max_bytes,
        max_msgs_per_subject=1,
        # A message larger than max_bytes would be accepted and leave the stream empty.
        max_msg_size=min(frames.MAX_FRAME + NATS_HEADERS, max_bytes),
        allow_direct=True,
    )


def index_for(bus: Bus, identity: Identity) -> PrefixIndex:
    """An empty index for blocks of this identity on this (connected) bus."""
    return PrefixIndex(frames.part_count(identity.block_bytes, frames.part_bytes_for(bus.max_payload)))


@dataclass(slots=True)
class _Put:
    """A block on its way, and what became of its parts; `left` of them are not answered yet."""

    meta: BlockMeta
    payload: memoryview
    left: int
    new: bool = False
    failed: bool = False


@dataclass(slots=True)
class _Page:
    """One batched get after checking. `damaged` holds the sequence of each bad part, by (name, part)."""

    payloads: dict[bytes, memoryview] = field(default_factory=dict)
    producers: set[str] = field(default_factory=set)
    damaged: dict[tuple[bytes, int], int] = field(default_factory=dict)
    absent: list[bytes] = field(default_factory=list)


class StreamBlockStore:
    """`BlockStore` on the stream of `block_stream`. Give it a connection of its own: bulk bytes delay control messages.

    Raises ConfigError when blocks do not fit the bus, or the index counts other parts than the store cuts.
    """

    def __init__(self, bus: Bus, subjects: Subjects, identity: Identity, index: PrefixIndex) -> None:
        frames.check_identity(identity)
        self._bus = bus
        self._subjects = subjects
        self._identity = identity
        self._index = index
        self._part_bytes = frames.part_bytes_for(bus.max_payload)
        self._parts = frames.part_count(identity.block_bytes, self._part_bytes)
        if index.parts != self._parts:
            raise ConfigError(f"blocks have {self._parts} parts under this max_payload, the index counts {index.parts}")
        self._window = Window(WINDOW_COUNT, WINDOW_BYTES)
        self._pages = asyncio.Semaphore(PAGES)
        self._refresher = Refresher(bus, index, self._window)
        self._damaged: dict[tuple[bytes, int], int] = {}
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    @property
    def counters(self) -> Mapping[str, int]:
        return {**self._counters, "refreshed": self._refresher.refreshed}

    async def close(self) -> None:
        await self._refresher.close()

    # Put

    async def put(self, blocks: Sequence[tuple[BlockMeta, memoryview]], timeout: float = 10.0) -> PutReport:
        for meta, payload in blocks:
            frames.check_block(meta, payload.nbytes, self._identity)
        wanted = [_Put(m, payload, self._parts) for m, payload in blocks if not self._index.present(m.name)]
        try:
            async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
                for batch in self._batches(wanted, HASH_BYTES):
                    if any(put.failed for put in wanted):
                        break  # the bus is in trouble; the rest would only wait for it too
                    await self._put_batch(batch, group)
        except TimeoutError:
            pass  # what has parts left has failed
        failed = sum(put.failed or put.left > 0 for put in wanted)
        stored = sum(put.new and not put.failed and put.left == 0 for put in wanted)
        existed = len(blocks) - stored - failed
        self._counters.update(put=stored, exists=existed, put_failed=failed)
        return PutReport(stored, existed, failed)

    def _batches(self, items: Sequence[T], nbytes: int) -> Iterator[Sequence[T]]:
        """Blocks, or things of one block each, in runs of about `nbytes` bytes of payload."""
        size = min(MAX_BATCH, max(1, nbytes // self._identity.block_bytes))
        return (items[start : start + size] for start in range(0, len(items), size))

    async def _put_batch(self, batch: Sequence[_Put], group: asyncio.TaskGroup) -> None:
        def encode() -> list[list[tuple[bytes, memoryview]]]:
            return [frames.encode(put.meta, put.payload, self._identity, self._part_bytes) for put in batch]

        for put, parts in zip(batch, await asyncio.to_thread(encode), strict=True):
            if any(other.failed for other in batch):
                return
            for part, frame in enumerate(parts):
                size = len(frame[1])
                await self._window.acquire(size)
                task = group.create_task(self._put_part(put, part, frame))
                task.add_done_callback(partial(self._part_done, size))

    def _part_done(self, size: int, _: asyncio.Task[None]) -> None:
        # A callback, not a `finally` in the task: a task cancelled before its first step never reaches its `finally`.
        self._window.release(size)

    async def _put_part(self, put: _Put, part: int, frame: tuple[bytes, memoryview]) -> None:
        subject = self._subjects.block(put.meta.name, part)
        # Put if absent; a part that we saw damaged is replaced, if it is still the same one.
        expected = {self._damaged.pop((put.meta.name, part), 0): None, 0: None}
        try:
            for expect_last in expected:
                with contextlib.suppress(SequenceConflict):  # somebody else's is there
                    await self._bus.append(subject, frame, expect_last=expect_last)
                    put.new = True
                    self._counters["bytes_out"] += len(frame[1])
                    break
            put.left -= 1
        except TrineError:
            put.failed = True

    # Get

    async def get(self, blocks: Sequence[BlockMeta], timeout: float = 5.0) -> Fetched:
        fetched = Fetched()
        asked = list({meta.name: meta for meta in blocks}.values())
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as group:
                for metas in self._batches(asked, PAGE_BYTES):
                    group.create_task(self._get_page(metas, fetched, deadline))
        except TimeoutError:
            pass  # pages that were complete by now are in `fetched`
        self._counters.update(hit=len(fetched), miss=len(asked) - len(fetched))
        self._counters["bytes_in"] += len(fetched) * self._identity.block_bytes
        return fetched

    async def _get_page(self, metas: Sequence[BlockMeta], fetched: Fetched, deadline: float) -> None:
        async with self._pages:
            told = {meta.name: self._index.sequence(meta.name) for meta in metas}
            subjects = [self._subjects.block(meta.name, part) for meta in metas for part in range(self._parts)]
            left = deadline - asyncio.get_running_loop().time()
            try:
                stored = await self._bus.get_many(self._subjects.block_stream, subjects, timeout=left)
            except TrineError:
                await asyncio.sleep(ERROR_PAUSE_S)
                return
            page = await asyncio.to_thread(self._check, metas, stored)
        fetched.update(page.payloads)
        fetched.producers |= page.producers
        for name in page.payloads:
            self._refresher.offer(name, (stored[self._subjects.block(name, part)] for part in range(self._parts)))
        self._note_damage(page)
        for name in (*page.absent, *(name for name, _ in page.damaged)):
            if self._index.sequence(name) == told[name]:  # else the feed told of a newer one meanwhile
                self._index.forget(name)

    def _note_damage(self, page: _Page) -> None:
        self._counters["reject"] += len({name for name, _ in page.damaged})
        self._damaged.update(page.damaged)
        while len(self._damaged) > MAX_DAMAGED:
            del self._damaged[next(iter(self._damaged))]

    def _check(self, metas: Sequence[BlockMeta], stored: Mapping[str, Stored]) -> _Page:
        """Decode and verify; runs in a thread and touches no state."""
        page = _Page()
        for meta in metas:
            parts = [stored.get(self._subjects.block(meta.name, part)) for part in range(self._parts)]
            bodies: list[memoryview] = []
            for part, message in enumerate(parts):
                if message is None:
                    continue
                try:
                    frame = frames.decode(message.data)
                    frames.verify(frame, meta, self._identity, part, self._part_bytes)
                except FrameError:
                    page.damaged[meta.name, part] = message.seq
                    continue
                bodies.append(frame.body)
                producer = frame.producer
            if len(bodies) == self._parts:
                page.payloads[meta.name] = bodies[0] if self._parts == 1 else memoryview(b"".join(bodies))
                page.producers.add(producer)
            elif None in parts:
                page.absent.append(meta.name)
        return page
