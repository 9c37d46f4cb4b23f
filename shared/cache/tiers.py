"""Two tiers as one `BlockStore` for readers: this machine's memory, and the stream for what it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.cache.frames import BlockMeta
from shared.cache.host_store import HostStore
from shared.cache.store import BlockStore, Fetched, PutReport


class TieredStore:
    def __init__(self, host: HostStore, stream: BlockStore) -> None:
        self._host = host
        self._stream = stream

    @property
    def counters(self) -> Mapping[str, int]:
        """The stream's, and the host tier's with `host_` before them."""
        return {**self._stream.counters, **{f"host_{name}": n for name, n in self._host.counters.items()}}

    async def put(self, blocks: Sequence[tuple[BlockMeta, memoryview]], timeout: float = 10.0) -> PutReport:
        await self._host.put(blocks)
        return await self._stream.put(blocks, timeout)

    async def get(
        self, blocks: Sequence[BlockMeta], timeout: float = 5.0, places: Sequence[memoryview] | None = None
    ) -> Fetched:
        found = await self._host.get(blocks, places=places)
        missing = [index for index, meta in enumerate(blocks) if meta.name not in found]
        if missing:
            rest = None if places is None else [places[index] for index in missing]
            more = await self._stream.get([blocks[index] for index in missing], timeout, rest)
            found.update(more)
            found.producers |= more.producers
        return found

    async def close(self) -> None:
        await self._stream.close()
        await self._host.close()
