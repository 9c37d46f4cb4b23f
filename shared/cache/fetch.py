"""From the shared cache into a pool, block after block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.cache.frames import BlockMeta
from shared.cache.store import BlockStore

PAGE = 16  # blocks asked for at once: small enough to overlap with the prefill that makes the next ones


async def fetch(store: BlockStore, wanted: Sequence[BlockMeta], take: Callable[[int, memoryview], bool]) -> set[str]:
    """Get `wanted` in order and hand each to `take(its index, its bytes)`; stops at a miss, or when `take` says False.

    `take` is told of a block long after it was asked for: it must look whether its place is still its own. Returns
    the workers that computed what was found.
    """
    producers: set[str] = set()
    for start in range(0, len(wanted), PAGE):
        page = wanted[start : start + PAGE]
        found = await store.get(page)
        producers |= found.producers
        for index, meta in enumerate(page, start):
            if meta.name not in found or not take(index, found[meta.name]):
                return producers
    return producers
