"""What the shared cache promises, held against a bus in memory and against a real nats-server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from shared.bus.base import Bus
from shared.bus.embedded import EmbeddedNats
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.nats import NatsBus
from shared.cache.store import PutReport
from shared.cache.stream_store import StreamBlockStore
from shared.messages import Identity
from tests.cache_rig import IDENTITY, SUBJECTS, Cache, cache_on, eventually, payload, right

pytestmark = pytest.mark.anyio

MiB = 1 << 20
REAL = Identity(fingerprint="f" * 64, codec="none", block_size=4, block_bytes=737_280)  # 16 tokens of SmolLM2 in fp32


class Fleet:
    """Connections to one bus; `restart` is what the death and return of the server does."""

    def __init__(self, server: EmbeddedNats | None) -> None:
        self.server = server
        self.broker = MemoryBroker()
        self.buses: list[Bus] = []

    async def connect(self) -> Bus:
        bus: Bus = (
            await NatsBus.connect(self.server.url, name="test", wait=10.0) if self.server else MemoryBus(self.broker)
        )
        self.buses.append(bus)
        return bus

    async def restart(self) -> None:
        if self.server:
            self.server.kill()
            await self.server.start_async()
            return
        self.broker.disconnect()
        self.broker.wipe_memory_streams()
        await asyncio.sleep(0.05)
        self.broker.reconnect()


@pytest.fixture(params=["memory", "nats"])
async def fleet(request: pytest.FixtureRequest, anyio_backend: str) -> AsyncIterator[Fleet]:
    server = EmbeddedNats() if request.param == "nats" else None
    if server:
        await server.start_async()
    fleet = Fleet(server)
    try:
        yield fleet
    finally:
        for bus in fleet.buses:
            await bus.close()
        if server:
            server.stop()


async def stored(cache: Cache, first: int, blocks: int) -> list[bytes]:
    """Store `blocks` blocks and wait until the index knows them."""
    new = cache.blocks(range(first, first + 4 * blocks))
    report = await cache.store.put(new)
    assert report.failed == 0, "put failed"
    await cache.told([meta for meta, _ in new])
    return [meta.name for meta, _ in new]


async def test_one_worker_reads_what_another_wrote(fleet):
    async with cache_on(await fleet.connect()) as writer, cache_on(await fleet.connect()) as reader:
        blocks = writer.blocks(range(80))
        names = [meta.name for meta, _ in blocks]
        report, present = await asyncio.gather(writer.store.put(blocks), reader.follower.wait(names, 5.0))
        assert report == PutReport(stored=20)
        assert present > 0
        fetched = await reader.store.get([meta for meta, _ in blocks])
        assert len(fetched) == 20
        assert right(fetched)
        assert fetched.producers == {"worker-1"}


async def test_put_if_absent(fleet):
    async with cache_on(await fleet.connect()) as cache:
        blocks = cache.blocks(range(40))
        bus = await fleet.connect()
        reports = await asyncio.gather(
            *(StreamBlockStore(bus, SUBJECTS, IDENTITY, type(cache.index)()).put(blocks) for _ in range(3))
        )
        assert sum(r.stored for r in reports) == 10
        assert sum(r.existed for r in reports) == 20


async def test_missing_blocks_are_left_out(fleet):
    async with cache_on(await fleet.connect()) as cache:
        await stored(cache, 0, 4)
        metas = cache.metas(range(40))
        fetched = await cache.store.get(metas)
        assert set(fetched) == {meta.name for meta in metas[:4]}
        assert await cache.store.get(cache.metas(range(1000, 1040))) == {}
        assert cache.store.counters["miss"] == 16


async def test_real_blocks_of_many_pages(fleet):
    async with (
        cache_on(await fleet.connect(), REAL, 256 * MiB) as writer,
        cache_on(await fleet.connect(), REAL, 256 * MiB) as reader,
    ):
        blocks = writer.blocks(range(4 * 48))
        assert await writer.store.put(blocks, timeout=30.0) == PutReport(stored=48)
        fetched = await reader.store.get([meta for meta, _ in blocks], timeout=30.0)
        assert len(fetched) == 48
        assert right(fetched, REAL)


@pytest.mark.parametrize("size", [4 * MiB, 4 * MiB + 1, 9 * MiB])
async def test_blocks_of_several_parts(fleet, size):
    identity = REAL.model_copy(update={"block_bytes": size})
    async with cache_on(await fleet.connect(), identity, 128 * MiB) as cache:
        await stored(cache, 0, 3)
        fetched = await cache.store.get(cache.metas(range(12)), timeout=30.0)
        assert len(fetched) == 3
        assert right(fetched, identity)
        assert cache.bus.counters["reconnects"] == 0


async def test_eviction_is_a_miss_and_shows_in_the_index(fleet):
    async with cache_on(await fleet.connect(), REAL, 8 * MiB) as cache:
        old = await stored(cache, 0, 6)
        await cache.store.put(cache.blocks(range(1000, 1000 + 4 * 20)), timeout=30.0)
        await eventually(lambda: cache.index.longest(old) == 0)
        assert await cache.store.get(cache.metas(range(24))) == {}
        assert (await cache.store.put(cache.blocks(range(24)), timeout=30.0)).stored == 6, (
            "evicted blocks can be put again"
        )


async def test_a_damaged_block_is_rejected_and_replaced(fleet):
    async with cache_on(await fleet.connect()) as cache:
        (meta,) = cache.metas(range(4))
        await cache.bus.append(SUBJECTS.block(meta.name), os.urandom(1100))
        await cache.told([meta])
        assert await cache.store.get([meta]) == {}
        assert cache.store.counters["reject"] == 1
        assert not cache.index.present(meta.name)
        assert await cache.store.put([(meta, payload(meta))]) == PutReport(stored=1)
        assert right(await cache.store.get([meta]))
        await cache.told([meta])


async def test_a_restarted_server_has_an_empty_cache_that_fills_again(fleet):
    async with cache_on(await fleet.connect()) as cache:
        names = await stored(cache, 0, 10)
        await fleet.restart()
        metas = cache.metas(range(40))
        async with asyncio.timeout(20):
            while cache.index.longest(names) > 0 or (await cache.store.put(cache.blocks(range(40)))).failed:
                await asyncio.sleep(0.05)
        await cache.told(metas)
        fetched = await cache.store.get(metas)
        assert len(fetched) == 10
        assert right(fetched)


async def test_trouble_never_raises_while_the_server_restarts(fleet):
    async with cache_on(await fleet.connect()) as cache:
        await stored(cache, 0, 10)
        stop = asyncio.Event()
        answers = 0

        async def hammer() -> None:
            nonlocal answers
            while not stop.is_set():
                assert right(await cache.store.get(cache.metas(range(40)), timeout=1.0))
                await cache.store.put(cache.blocks(range(40)), timeout=1.0)
                answers += 1

        working = asyncio.create_task(hammer())
        await asyncio.sleep(0.2)
        await fleet.restart()
        await asyncio.sleep(1.0)
        stop.set()
        await asyncio.wait_for(working, 10.0)
        assert answers > 1


async def test_nobody_is_kept_waiting_by_a_dead_bus(fleet):
    async with cache_on(await fleet.connect()) as cache:
        blocks = cache.blocks(range(400))
        if fleet.server:
            fleet.server.kill()
        else:
            fleet.broker.disconnect()
        async with asyncio.timeout(5.0):
            assert await cache.store.get([meta for meta, _ in blocks], timeout=1.0) == {}
            assert (await cache.store.put(blocks, timeout=1.0)).stored == 0
            assert await cache.follower.wait([blocks[0][0].name], 0.2) == 0
