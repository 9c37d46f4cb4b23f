"""Publishes a pool's full blocks in the shared cache, beside the steps that fill the next ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio

from shared.cache.blocks import BlockAllocator
from shared.cache.frames import BlockMeta
from shared.cache.store import BlockStore

BATCH = 16  # blocks per put
MAX_PENDING = 1024  # more than that and new blocks are not published: it is only a cache


class BlockPublisher:
    """Holds a reference on every block it has yet to store, so that none is recycled under it.

    `known` tells whether the store has a block already.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        store: BlockStore,
        known: Callable[[bytes], bool],
        read_block: Callable[[int], memoryview],
        producer: str,
    ) -> None:
        self._allocator = allocator
        self._store = store
        self._known = known
        self._read_block = read_block
        self._producer = producer
        self._pending: dict[bytes, tuple[BlockMeta, int]] = {}
        self._storing: set[bytes] = set()
        self._changed = anyio.Event()
        self.skipped = 0

    def offer(self, meta: BlockMeta) -> None:
        """Publish the block that the allocator holds under `meta.name`, unless the store has it or too many wait."""
        if meta.name in self._pending or self._known(meta.name):
            return
        if len(self._pending) >= MAX_PENDING or (block := self._allocator.take(meta.name)) is None:
            self.skipped += 1
            return
        self._pending[meta.name] = (replace(meta, producer=self._producer), block)
        self._notify()

    async def run(self) -> None:
        """Side task: store what was offered, oldest first. The store never raises: what fails is not cached."""
        while True:
            changed = self._changed
            batch = list(self._pending.values())[:BATCH]
            if not batch:
                await changed.wait()
                continue
            self._storing = {meta.name for meta, _ in batch}
            try:
                await self._store.put([(meta, self._read_block(block)) for meta, block in batch])
            finally:
                self._storing = set()
                self._end(batch)

    async def forget(self, scope: str | None) -> None:
        """Do not store what waits, of this scope or of all. Returns when nothing of before is on its way any more."""
        waiting = [entry for name, entry in self._pending.items() if name not in self._storing]
        self._end([(meta, block) for meta, block in waiting if scope in (None, meta.scope)])
        storing = self._storing
        while storing and self._storing is storing:
            await self._changed.wait()

    def _end(self, entries: Sequence[tuple[BlockMeta, int]]) -> None:
        for meta, block in entries:
            del self._pending[meta.name]
            self._allocator.release([block])
        self._notify()

    async def settled(self, names: Sequence[bytes]) -> None:
        """Returns when none of these blocks waits to be stored any more."""
        while any(name in self._pending for name in names):
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
