"""Memory of the machine in front of the stream: what is read from where, and when a place comes free."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from shared.bus.block_link import Item, Receive
from shared.bus.bus_link import BytesReader
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.cache import frames, naming
from shared.cache.blocks import BlockAllocator, BlockMisuse, OutOfBlocks
from shared.cache.host import HostBlocks
from shared.cache.host_store import PREFIX, HostStore, folder_for
from shared.cache.lane import Lane, in_thread
from shared.cache.prefix import PrefixCache
from shared.config import MiB, Settings
from shared.engine.span import Span
from shared.errors import BusDisconnected, TrineError
from shared.subjects import Subjects
from tests.cache_rig import eventually
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
SUBJECTS = Subjects("fake")
TOKENS = tuple(range(100, 132))
BLOCKS = len(TOKENS) // 4


class Worker:
    """A prefix cache with a pool whose blocks hold their own tokens."""

    def __init__(self, broker: MemoryBroker, name: str, folder: Path | None) -> None:
        self.bus = MemoryBus(broker)
        self.engine = FakeEngine()
        self.allocator = BlockAllocator(64, 4)
        host = HostStore(folder, self.engine.identity, 64 * MiB) if folder else None
        self.cache = PrefixCache(self.bus, SUBJECTS, 64 * MiB, self.engine, self.allocator, name, host)
        root = naming.root(self.engine.identity, "default")
        self.metas = frames.metas(root, TOKENS, 4)
        self.names = [meta.name for meta in self.metas]

    def compute(self) -> None:
        """The blocks of TOKENS, offered to the cache."""
        table = self.allocator.allocate(BLOCKS)
        self.engine.step([Span(TOKENS, 0, tuple(table))])
        for block, meta in zip(table, self.metas, strict=True):
            self.allocator.commit(block, meta.name)
            self.cache.offer(meta)

    async def load(self) -> tuple[list[int], set[str]]:
        """Fetch all blocks; returns those that came and who computed them."""
        table: list[int] = []
        taken: list[int] = []

        def claim(index: int) -> int:
            table.extend(self.allocator.allocate(1))
            return table[index]

        def take(index: int) -> bool:
            taken.append(table[index])
            return True

        producers = await self.cache.fetch(self.metas, claim, take)
        return taken, producers

    def holds(self, blocks: Sequence[int]) -> bool:
        """Whether these blocks are those of TOKENS."""
        packed = b"".join(bytes(self.engine.read_block(block)) for block in blocks)
        return packed == naming.pack_tokens(TOKENS)


@asynccontextmanager
async def machine(broker: MemoryBroker, *workers: tuple[str, Path | None]) -> AsyncIterator[list[Worker]]:
    made = [Worker(broker, name, folder) for name, folder in workers]
    async with asyncio.TaskGroup() as group:
        for worker in made:
            await worker.cache.start()
        tasks = [group.create_task(worker.cache.publish()) for worker in made]
        try:
            yield made
        finally:
            for task in tasks:
                task.cancel()
            for worker in made:
                await worker.cache.close()
                await worker.bus.close()


async def test_a_neighbour_reads_from_memory_and_not_from_the_stream(tmp_path: Path) -> None:
    folder = tmp_path / "host"
    async with machine(MemoryBroker(), ("one", folder), ("two", folder)) as (one, two):
        one.compute()
        await eventually(lambda: two.cache.longest(two.names) == BLOCKS)
        taken, producers = await two.load()
        assert two.holds(taken) and producers == {"one"}
        counters = two.cache.counters
        assert counters["cache_host_hit"] == BLOCKS and "cache_hit" not in counters and "cache_bytes_in" not in counters
    assert not folder.exists(), "the last one out removes it"


async def test_another_machine_reads_from_the_stream_and_shares_it_with_its_neighbours(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    async with machine(MemoryBroker(), ("one", here), ("two", there), ("three", there)) as (one, two, three):
        one.compute()
        await eventually(lambda: two.cache.longest(two.names) == BLOCKS)
        taken, producers = await two.load()
        assert two.holds(taken) and producers == {"one"}
        assert two.cache.counters["cache_hit"] == BLOCKS and "cache_host_hit" not in two.cache.counters
        for block, meta in zip(taken, two.metas, strict=True):
            two.allocator.commit(block, meta.name)
            two.cache.share(meta)
        await eventually(lambda: two.cache.counters.get("cache_host_put") == BLOCKS)
        assert "cache_put" not in two.cache.counters, "the stream has them"
        taken, producers = await three.load()
        assert three.holds(taken) and producers == {"two"}
        assert three.cache.counters["cache_host_hit"] == BLOCKS


async def test_a_prefix_may_lie_in_both_tiers(tmp_path: Path) -> None:
    async with machine(MemoryBroker(), ("one", None), ("two", tmp_path / "host")) as (one, two):
        one.compute()
        await eventually(lambda: two.cache.longest(two.names) == BLOCKS)
        host = two.cache._host
        assert host is not None
        for index in (0, 1, 5):
            source = one.allocator.match([one.names[index]])[0]
            await host.put([(one.metas[index], one.engine.read_block(source))])
        taken, _ = await two.load()
        assert two.holds(taken)
        assert two.cache.counters["cache_host_hit"] == 3 and two.cache.counters["cache_hit"] == BLOCKS - 3


async def test_who_waits_sees_a_neighbours_block_before_the_stream_tells_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "host"
    async with machine(MemoryBroker(), ("one", folder), ("two", folder)) as (one, two):
        waiting = asyncio.create_task(two.cache.wait(two.names, 5.0))
        await asyncio.sleep(0.02)
        host, table = one.cache._host, one.allocator.allocate(BLOCKS)
        one.engine.step([Span(TOKENS, 0, tuple(table))])
        assert host is not None
        await host.put([(one.metas[0], one.engine.read_block(table[0]))])
        assert await waiting == 1
        started = time.monotonic()
        assert await two.cache.wait(two.names[1:], 0.1) == 0
        assert time.monotonic() - started < 1.0


async def test_a_folder_that_cannot_be_used_leaves_the_stream(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    async with machine(MemoryBroker(), ("one", tmp_path / "file"), ("two", None)) as (one, two):
        one.compute()
        await eventually(lambda: two.cache.longest(two.names) == BLOCKS)
        taken, _ = await two.load()
        assert two.holds(taken)


def test_each_fleet_has_a_folder_of_its_own(tmp_path: Path) -> None:
    one, two = (Settings(nats_url=f"nats://user:secret@host:{port}") for port in (1, 2))
    assert folder_for(one) == folder_for(one) != folder_for(two)
    assert "secret" not in str(folder_for(one)) and folder_for(one).name.startswith(PREFIX)
    assert folder_for(Settings(host_cache_dir=str(tmp_path))) == tmp_path
    assert HostStore.of(Settings(host_cache_mb=0), FakeEngine().identity) is None


async def test_memory_of_fleets_that_were_killed_is_given_back(tmp_path: Path) -> None:
    """And that of those that live is left alone."""
    identity = FakeEngine().identity
    dead, alive = tmp_path / f"{PREFIX}dead", tmp_path / f"{PREFIX}alive"
    dead.mkdir(mode=0o700)
    (dead / ("ab" * 32)).write_bytes(b"left")
    neighbour = HostBlocks(alive, identity, MiB)
    assert neighbour.open()
    ours = HostStore(tmp_path / f"{PREFIX}ours", identity, MiB)
    assert await ours.open() == ""
    assert not dead.exists() and alive.exists()
    await ours.close()
    neighbour.close()


class SlowLink:
    """Writes into a place for as long as it is not closed, and then once more."""

    def __init__(self) -> None:
        self.payload = b""
        self.reading = threading.Event()
        self.closed = threading.Event()
        self.ended = threading.Event()

    def get(self, stream: str, subjects: Sequence[str], receive: Receive, deadline: float) -> None:
        self.reading.set()
        self.closed.wait(deadline - time.monotonic())
        time.sleep(0.05)
        receive(subjects[0], 1, len(self.payload), BytesReader(self.payload))
        self.ended.set()
        raise BusDisconnected("closed")

    def put(self, items: Sequence[Item], deadline: float) -> list[int | TrineError]:
        raise NotImplementedError

    def close(self) -> None:
        self.closed.set()


async def test_a_block_is_nobody_elses_while_bytes_may_still_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequence ends, and its reader is cancelled: the block comes free only when the thread has let go of it."""
    link = SlowLink()
    monkeypatch.setattr(MemoryBus, "link", lambda _: link)
    worker = Worker(MemoryBroker(), "one", None)
    await worker.cache.start()
    worker.compute()
    (frame,) = frames.encode(worker.metas[0], worker.engine.read_block(0), worker.engine.identity, 1 << 20)
    link.payload = b"".join(frame)
    block = worker.allocator.allocate(1)[0]
    free = worker.allocator.available

    def claim(index: int) -> int:
        return block

    reading = asyncio.create_task(worker.cache.fetch(worker.metas[:1], claim, lambda _: True))
    await asyncio.to_thread(link.reading.wait, 5)
    worker.allocator.release([block])  # the sequence has ended
    assert worker.allocator.available == free
    reading.cancel()
    await asyncio.sleep(0.02)
    assert not reading.done() and worker.allocator.available == free
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert link.ended.is_set() and worker.allocator.available == free + 1
    await worker.cache.close()


async def test_only_what_somebody_holds_can_be_held() -> None:
    allocator = BlockAllocator(2, 4)
    blocks = allocator.allocate(2)
    allocator.hold(blocks)
    allocator.release(blocks)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(1)
    allocator.release(blocks)
    assert allocator.available == 2
    with pytest.raises(BlockMisuse):
        allocator.hold(blocks)


async def test_claims_that_end_early_fetch_only_what_was_claimed() -> None:
    broker = MemoryBroker()
    async with machine(broker, ("one", None), ("two", None)) as (one, two):
        one.compute()
        await eventually(lambda: two.cache.longest(two.names) == BLOCKS)
        blocks = two.allocator.allocate(3)
        taken: list[int] = []

        def take(index: int) -> bool:
            taken.append(index)
            return True

        await two.cache.fetch(two.metas, lambda index: blocks[index] if index < 3 else None, take)
        assert taken == [0, 1, 2]
        two.allocator.release(blocks)
        assert two.allocator.in_use == 0


async def test_engines_without_a_landing_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async with machine(MemoryBroker(), ("one", None), ("two", None)) as (one, two):
        monkeypatch.setattr(two.engine, "landing", lambda block: None)
        one.compute()
        await eventually(lambda: two.cache.longest(two.names) == BLOCKS)
        taken, _ = await two.load()
        assert two.holds(taken)


async def test_cancelling_hurries_and_still_waits() -> None:
    hurried, ended = threading.Event(), threading.Event()

    def work() -> None:
        hurried.wait(10)
        time.sleep(0.05)
        ended.set()

    task = asyncio.create_task(in_thread(work, hurried.set))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_cancelled_scope_hurries_too() -> None:
    """anyio's cancellation, which is what ends a worker's side tasks."""
    hurried, started = threading.Event(), time.monotonic()
    with anyio.move_on_after(0.05) as scope:
        await in_thread(lambda: hurried.wait(10), hurried.set)
    assert scope.cancelled_caught and hurried.is_set() and time.monotonic() - started < 5


async def test_a_closed_lane_gives_no_link_any_more() -> None:
    lane = Lane(MemoryBus(MemoryBroker()))
    item = Item("somewhere", (b"",))
    lane.close()
    (result,) = await lane.run(lambda link: link.put([item], time.monotonic() + 5))
    assert isinstance(result, BusDisconnected)


async def test_a_cancelled_call_leaves_a_lane_that_works() -> None:
    lane = Lane(MemoryBus(MemoryBroker()))
    first = lane._link
    with anyio.move_on_after(0.02):
        await lane.run(lambda link: time.sleep(0.1))
    assert await lane.run(lambda link: link is not first and link.put([], time.monotonic() + 5) == [])


async def test_waiting_for_nothing_does_not_stop_the_loop(tmp_path: Path) -> None:
    """A sequence that was ended meanwhile has no names left to wait for."""
    async with machine(MemoryBroker(), ("one", tmp_path / "host")) as (one,):
        waiting, ticks, started = asyncio.create_task(one.cache.wait([], 0.3)), 0, time.monotonic()
        while time.monotonic() - started < 0.2:
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks >= 5
        assert await waiting == 0


async def test_a_lane_is_for_one_at_a_time() -> None:
    lane, inside, most = Lane(MemoryBus(MemoryBroker())), 0, 0

    def work(_: object) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1

    await asyncio.gather(*(lane.run(work) for _ in range(5)))
    assert most == 1
