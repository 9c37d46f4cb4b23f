"""From the shared cache into a pool, block after block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.cache.blocks import BlockAllocator
from shared.cache.frames import BlockMeta
from shared.cache.store import BlockStore
from shared.engine.base import StepEngine

PAGE = 16  # blocks asked for at once: small enough to overlap with the prefill that makes the next ones

Claim = Callable[[int], int | None]
"""The block of the pool that is to be number `index` of what is wanted; None when there is none, or no need."""
Take = Callable[[int], bool]
"""Number `index` is in its block. False when nobody wants it any more, or the next ones."""


async def fetch(
    store: BlockStore,
    engine: StepEngine,
    allocator: BlockAllocator,
    wanted: Sequence[BlockMeta],
    claim: Claim,
    take: Take,
) -> set[str]:
    """Get `wanted` in order, straight into the pool; stops at a miss, or when `claim` or `take` say so.

    A block is told long after it was claimed: `take` must look whether its place is still its own. Until then it is
    held here, so that nobody else gets it while bytes may still arrive. Returns the workers that computed what came.
    """
    producers: set[str] = set()
    for start in range(0, len(wanted), PAGE):
        page = wanted[start : start + PAGE]
        blocks: list[int] = []
        for index in range(start, start + len(page)):
            if (block := claim(index)) is None:
                break
            allocator.hold([block])
            blocks.append(block)
        try:
            found = await _into(store, engine, page[: len(blocks)], blocks, producers)
            taken = all(take(start + i) for i in range(found))
        finally:
            allocator.release(blocks)
        if found < len(page) or not taken:
            break
    return producers


async def _into(
    store: BlockStore, engine: StepEngine, page: Sequence[BlockMeta], blocks: Sequence[int], producers: set[str]
) -> int:
    """How many of `page`, from the first on, are in their blocks now."""
    if not page:
        return 0
    landings = [engine.landing(block) for block in blocks]
    places = [memoryview(bytearray(engine.info.block_bytes)) if place is None else place for place in landings]
    found = await store.get(page, places=places)
    producers |= found.producers
    for index, meta in enumerate(page):
        if meta.name not in found:
            return index
        if landings[index] is None:
            engine.write_block(blocks[index], places[index])
    return len(page)
