"""The host tier as a `BlockStore`: its blocking calls in threads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.cache.frames import BlockMeta
from shared.cache.host import HostBlocks
from shared.cache.lane import in_thread
from shared.cache.store import Fetched, PutReport
from shared.config import MiB, Settings, shared_memory
from shared.messages import Identity

PREFIX = f"trine-{os.getuid() if hasattr(os, 'getuid') else 0}-"


def folder_for(settings: Settings) -> Path:
    """The folder that all workers on this machine with one NATS address use, and no others: each fleet has its own."""
    if settings.host_cache_dir:
        return Path(settings.host_cache_dir)
    return shared_memory() / (PREFIX + hashlib.sha256(settings.nats_url.encode()).hexdigest()[:12])


class HostStore:
    """`folder`: see `folder_for`; `max_bytes` bounds it for all processes together."""

    def __init__(self, folder: Path, identity: Identity, max_bytes: int) -> None:
        self._folder = folder
        self._identity = identity
        self._blocks = HostBlocks(folder, identity, max_bytes)

    @classmethod
    def of(cls, settings: Settings, identity: Identity) -> HostStore | None:
        """What the settings ask for, None for no host tier."""
        if not settings.host_cache_mb:
            return None
        return cls(folder_for(settings), identity, settings.host_cache_mb * MiB)

    @property
    def counters(self) -> Mapping[str, int]:
        return self._blocks.counters

    @property
    def held_bytes(self) -> int:
        """By all processes together."""
        return self._blocks.held_bytes

    def has(self, name: bytes) -> bool:
        return self._blocks.has(name)

    def longest(self, names: Sequence[bytes]) -> int:
        return self._blocks.longest(names)

    async def open(self) -> str:
        """Take part; what hinders it, "" if nothing does."""
        await in_thread(self._sweep)
        return "" if await in_thread(self._blocks.open) else self._blocks.trouble

    def _sweep(self) -> None:
        """Remove what fleets left that were killed whole: whoever joins alone and leaves again removes the folder."""
        for folder in self._folder.parent.glob(f"{PREFIX}*") if self._folder.name.startswith(PREFIX) else ():
            if folder != self._folder:
                left = HostBlocks(folder, self._identity, 0)
                left.open()
                left.close()

    async def drop(self) -> int:
        """Remove all blocks, for every process of the machine; says how many there were."""
        return await in_thread(self._blocks.drop)

    async def close(self) -> None:
        await in_thread(self._blocks.close)

    async def put(self, blocks: Sequence[tuple[BlockMeta, memoryview]], timeout: float = 10.0) -> PutReport:
        def put() -> int:
            return sum(self._blocks.put(meta, payload) for meta, payload in blocks)

        stored = await in_thread(put)
        return PutReport(stored=stored, failed=len(blocks) - stored)

    async def get(
        self, blocks: Sequence[BlockMeta], timeout: float = 5.0, places: Sequence[memoryview] | None = None
    ) -> Fetched:
        if places is None:
            places = [memoryview(bytearray(self._identity.block_bytes)) for _ in blocks]
        fetched = Fetched()
        pairs = list(zip(blocks, places, strict=True))
        producers = await in_thread(lambda: self._blocks.get(pairs))
        for (meta, place), producer in zip(pairs, producers, strict=True):
            if producer is not None:
                fetched[meta.name] = place
                fetched.producers.add(producer)
        return fetched
