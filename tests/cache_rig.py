"""A shared cache on a bus in memory that loses, delays and damages frames on demand; used by the cache's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shared.bus.base import Bus, Stored
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.cache import frames, naming
from shared.cache.follower import IndexFollower
from shared.cache.frames import BlockMeta
from shared.cache.index import PrefixIndex
from shared.cache.store import block_stream, index_for
from shared.cache.stream_store import StreamBlockStore
from shared.messages import Identity
from shared.subjects import Subjects

SUBJECTS = Subjects("test model")
IDENTITY = Identity(fingerprint="f" * 64, codec="none", block_size=4, block_bytes=1000)


class FaultyBus(MemoryBus):
    """`damage` changes what a get returns; `refuse` is raised by the next appends; appends and gets take `delay` s."""

    damage: Callable[[Stored], Stored | None] | None = None
    refuse: list[Exception]
    delay = 0.0

    def __init__(self, broker: MemoryBroker, *, max_payload: int = 1 << 20) -> None:
        super().__init__(broker, max_payload=max_payload)
        self.refuse = []
        self.appends: list[str] = []
        self.in_flight = 0
        self.most_in_flight = 0

    async def append(self, subject: str, data: bytes | Sequence[bytes | memoryview], **options) -> int:
        self.appends.append(subject)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay)
            if self.refuse:
                raise self.refuse.pop(0)
            return await super().append(subject, data, **options)
        finally:
            self.in_flight -= 1

    async def get_many(self, stream: str, subjects: Sequence[str], timeout: float = 5.0) -> dict[str, Stored]:
        await asyncio.sleep(self.delay)
        found = await super().get_many(stream, subjects, timeout)
        if self.damage is None:
            return found
        return {s: changed for s, m in found.items() if (changed := self.damage(m)) is not None}


@dataclass
class Cache:
    """One worker's view of the shared cache."""

    bus: Bus
    identity: Identity
    index: PrefixIndex
    follower: IndexFollower
    store: StreamBlockStore

    def metas(self, token_ids: Sequence[int], tenant: str = "t") -> list[BlockMeta]:
        return frames.metas(naming.root(self.identity, tenant), token_ids, self.identity.block_size, "worker-1")

    def blocks(self, token_ids: Sequence[int], tenant: str = "t") -> list[tuple[BlockMeta, memoryview]]:
        return [(meta, payload(meta, self.identity)) for meta in self.metas(token_ids, tenant)]

    async def told(self, metas: Sequence[BlockMeta]) -> None:
        """Wait until the feed has told of all of them."""
        for meta in metas:
            assert await self.follower.wait([meta.name], 5.0), "the feed did not tell of a block"


def payload(meta: BlockMeta, identity: Identity = IDENTITY) -> memoryview:
    """Bytes that stand for a block's KV: a function of its name, so that every wrong block shows."""
    return memoryview((meta.name * (identity.block_bytes // 32 + 1))[: identity.block_bytes])


def right(fetched: Mapping[bytes, memoryview], identity: Identity = IDENTITY) -> bool:
    return all(
        bytes(p) == (name * (identity.block_bytes // 32 + 1))[: identity.block_bytes] for name, p in fetched.items()
    )


@asynccontextmanager
async def cache_on(bus: Bus, identity: Identity = IDENTITY, max_bytes: int = 64 << 20) -> AsyncIterator[Cache]:
    index = index_for(bus, identity)
    follower = IndexFollower(bus, SUBJECTS, index, block_stream(SUBJECTS, max_bytes), poll=0.02)
    store = StreamBlockStore(bus, SUBJECTS, identity, index)
    await follower.start()
    try:
        yield Cache(bus, identity, index, follower, store)
    finally:
        await store.close()
        await follower.close()


@asynccontextmanager
async def faulty_cache(
    identity: Identity = IDENTITY,
    max_bytes: int = 64 << 20,
    broker: MemoryBroker | None = None,
    max_payload: int = 1 << 20,
) -> AsyncIterator[tuple[Cache, FaultyBus]]:
    bus = FaultyBus(broker or MemoryBroker(), max_payload=max_payload)
    try:
        async with cache_on(bus, identity, max_bytes) as cache:
            yield cache, bus
    finally:
        await bus.close()


async def eventually(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    """Return once `condition` holds; fail after `timeout` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)
