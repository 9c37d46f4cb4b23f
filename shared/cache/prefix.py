"""One worker's access to the shared prefix cache: index, store and publisher of its pool, wired together."""

from __future__ import annotations

from collections.abc import Mapping

from shared.bus.base import Bus
from shared.cache.blocks import BlockAllocator
from shared.cache.follower import IndexFollower
from shared.cache.publisher import BlockPublisher
from shared.cache.store import StreamBlockStore, block_stream, index_for
from shared.engine.base import StepEngine
from shared.subjects import Subjects


class PrefixCache:
    """`bus` is a connection for bulk bytes alone: on a control connection they would delay everything else."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        cache_bytes: int,
        engine: StepEngine,
        allocator: BlockAllocator,
        worker: str,
    ) -> None:
        self.stream = block_stream(subjects, cache_bytes)
        self.index = index_for(bus, engine.identity)
        self.follower = IndexFollower(bus, subjects, self.index, self.stream)
        self.store = StreamBlockStore(bus, subjects, engine.identity, self.index)
        self.publisher = BlockPublisher(allocator, self.store, self.index, engine.read_block, worker)

    @property
    def counters(self) -> Mapping[str, int]:
        """Of store and follower, for the beat."""
        return {f"cache_{name}": n for name, n in {**self.store.counters, **self.follower.counters}.items() if n}

    async def start(self) -> None:
        """Raises ConfigError if the cache's stream exists with another configuration."""
        await self.follower.start()

    async def close(self) -> None:
        await self.follower.close()
        await self.store.close()
