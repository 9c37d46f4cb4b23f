"""The shared cache's store and follower: faults of the bus are misses, windows hold, waits end."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from shared.bus.base import Stored, StreamState
from shared.bus.block_link import WINDOW_COUNT
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.cache import frames, stream_store
from shared.cache.follower import IndexFollower
from shared.cache.index import PrefixIndex
from shared.cache.store import PutReport, block_stream
from shared.cache.stream_store import StreamBlockStore
from shared.errors import BusDisconnected, ConfigError, FrameError, StreamFull, TooLarge
from tests.cache_rig import IDENTITY, SUBJECTS, eventually, faulty_cache, payload, right

pytestmark = pytest.mark.anyio


# Put


async def test_blocks_are_stored_once():
    async with faulty_cache() as (cache, bus):
        blocks = cache.blocks(range(32))
        assert await cache.store.put(blocks) == PutReport(stored=8)
        await cache.told([meta for meta, _ in blocks])
        bus.appends.clear()
        assert await cache.store.put(blocks) == PutReport(existed=8)
        assert bus.appends == [], "what the index knows is not sent again"
        assert cache.store.counters["put"] == 8
        assert cache.store.counters["bytes_out"] == 8000


async def test_what_another_worker_stored_meanwhile_counts_as_there():
    async with faulty_cache() as (cache, bus):
        blocks = cache.blocks(range(16))
        other = StreamBlockStore(bus, SUBJECTS, IDENTITY, PrefixIndex())
        assert await other.put(blocks) == PutReport(stored=4)
        assert await StreamBlockStore(bus, SUBJECTS, IDENTITY, PrefixIndex()).put(blocks) == PutReport(existed=4)


async def test_no_more_than_the_window_is_in_flight():
    async with faulty_cache() as (cache, bus):
        bus.delay = 0.005
        blocks = cache.blocks(range(4 * 50))
        half = len(blocks) // 2
        reports = await asyncio.gather(cache.store.put(blocks[:half]), cache.store.put(blocks[half:]))
        assert sum(r.stored for r in reports) == 50
        assert bus.most_in_flight == WINDOW_COUNT


async def test_big_parts_are_bounded_by_bytes():
    identity = IDENTITY.model_copy(update={"block_bytes": 6 << 20})
    async with faulty_cache(identity, max_payload=8 << 20) as (cache, bus):
        bus.delay = 0.01
        assert (await cache.store.put(cache.blocks(range(4 * 6)))).stored == 6
        assert bus.most_in_flight <= 10, "12 parts of 4 and 2 MiB; 32 MiB hold ten of them"


@pytest.mark.parametrize("error", [BusDisconnected("gone"), TooLarge("too large"), StreamFull("full")])
async def test_trouble_is_counted_and_never_raised(error):
    async with faulty_cache() as (cache, bus):
        bus.refuse = [error] * 1000
        blocks = cache.blocks(range(4 * 200))
        assert await cache.store.put(blocks) == PutReport(failed=200)
        assert len(bus.appends) <= 64, "the rest is given up without waiting for it"
        bus.refuse = []
        assert (await cache.store.put(blocks)).stored == 200, "the window was given back"


async def test_put_ends_at_its_deadline_and_gives_the_window_back():
    async with faulty_cache() as (cache, bus):
        bus.delay = 60.0
        began = time.monotonic()
        assert await cache.store.put(cache.blocks(range(4 * 40)), timeout=0.1) == PutReport(failed=40)
        assert time.monotonic() - began < 2
        bus.delay = 0.0
        assert (await cache.store.put(cache.blocks(range(4 * 40)))).stored == 40


async def test_a_cancelled_put_gives_the_window_back():
    async with faulty_cache() as (cache, bus):
        bus.delay = 60.0
        task = asyncio.create_task(cache.store.put(cache.blocks(range(4 * 40))))
        await eventually(lambda: bus.in_flight == WINDOW_COUNT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        bus.delay = 0.0
        assert (await cache.store.put(cache.blocks(range(4 * 40)))).stored == 40


async def test_a_payload_of_another_size_is_a_bug_here():
    async with faulty_cache() as (cache, bus):
        meta, data = cache.blocks(range(4))[0]
        for wrong in ((meta, data[:-1]), (replace(meta, token_ids=(1,)), data)):
            with pytest.raises(FrameError):
                await cache.store.put([wrong])
        assert bus.appends == []


# Get


async def test_blocks_come_back_with_their_producers():
    async with faulty_cache() as (cache, _):
        blocks = cache.blocks(range(40))
        await cache.store.put(blocks)
        fetched = await cache.store.get([meta for meta, _ in blocks])
        assert len(fetched) == 10
        assert right(fetched)
        assert fetched.producers == {"worker-1"}
        assert (cache.store.counters["hit"], cache.store.counters["bytes_in"]) == (10, 10_000)


async def test_blocks_of_several_parts_come_back_whole():
    identity = IDENTITY.model_copy(update={"block_bytes": 100_000})
    async with faulty_cache(identity, max_payload=50_000) as (cache, bus):
        blocks = cache.blocks(range(16))
        assert await cache.store.put(blocks) == PutReport(stored=4)
        assert len(bus.appends) == 16
        fetched = await cache.store.get([meta for meta, _ in blocks])
        assert len(fetched) == 4
        assert right(fetched, identity)
        await cache.told([meta for meta, _ in blocks])


async def test_a_block_with_a_part_missing_is_a_miss():
    identity = IDENTITY.model_copy(update={"block_bytes": 100_000})
    async with faulty_cache(identity, max_payload=50_000) as (cache, bus):
        blocks = cache.blocks(range(8))
        await cache.store.put(blocks)
        lost = SUBJECTS.block(blocks[0][0].name, 2)
        bus.damage = lambda stored: None if stored.subject == lost else stored
        assert set(await cache.store.get([meta for meta, _ in blocks])) == {blocks[1][0].name}


async def test_pages_that_fail_do_not_take_the_others_along(monkeypatch):
    monkeypatch.setattr(stream_store, "PAGE_BYTES", 2000)
    async with faulty_cache() as (cache, bus):
        blocks = cache.blocks(range(32))
        await cache.store.put(blocks)
        doomed = SUBJECTS.block(blocks[3][0].name)

        def fail(stored: Stored) -> Stored:
            if stored.subject == doomed:
                raise BusDisconnected("in the middle")
            return stored

        bus.damage = fail
        fetched = await cache.store.get([meta for meta, _ in blocks])
        assert len(fetched) == 6, "the page of two blocks that failed is missing"
        assert cache.store.counters["miss"] == 2


async def test_get_ends_at_its_deadline_with_what_came():
    async with faulty_cache() as (cache, bus):
        blocks = cache.blocks(range(16))
        await cache.store.put(blocks)
        bus.delay = 60.0
        began = time.monotonic()
        assert await cache.store.get([meta for meta, _ in blocks], timeout=0.1) == {}
        assert time.monotonic() - began < 2
        bus.delay = 0.0
        assert len(await cache.store.get([meta for meta, _ in blocks])) == 4


async def test_without_a_bus_everything_is_a_miss():
    async with faulty_cache() as (cache, bus):
        blocks = cache.blocks(range(16))
        await cache.store.put(blocks)
        bus.disconnect()
        assert await cache.store.get([meta for meta, _ in blocks]) == {}
        assert await cache.store.put(cache.blocks(range(100, 116))) == PutReport(failed=4)


async def test_a_name_that_is_not_there_is_forgotten():
    async with faulty_cache() as (cache, bus):
        blocks = cache.blocks(range(16))
        names = [meta.name for meta, _ in blocks]
        await cache.store.put(blocks)
        await cache.told([meta for meta, _ in blocks])
        stream = bus.broker.streams[SUBJECTS.block_stream]
        stream.remove(stream.last_of(SUBJECTS.block(names[1])))
        assert cache.index.longest(names) == 4
        await cache.store.get([meta for meta, _ in blocks])
        assert cache.index.longest(names) == 1
        assert await cache.store.put(blocks) == PutReport(stored=1, existed=3)


async def test_a_miss_does_not_forget_what_was_stored_meanwhile():
    """Between the server's answer and ours the feed may tell of the block; it must stay known."""
    async with faulty_cache() as (cache, bus):
        blocks = cache.blocks(range(4))
        await cache.store.put(blocks)
        await cache.told([blocks[0][0]])

        def late(stored: Stored) -> None:
            cache.index.observe(stored.seq + 1, blocks[0][0].name)

        bus.damage = late
        assert await cache.store.get([blocks[0][0]]) == {}
        assert cache.index.sequence(blocks[0][0].name) == 2


async def test_bytes_are_checked_off_the_event_loop(monkeypatch):
    threads: list[int] = []
    for name in ("encode", "verify"):
        original = getattr(frames, name)

        def spy(*args, original=original):
            threads.append(threading.get_ident())
            return original(*args)

        monkeypatch.setattr(frames, name, spy)
    async with faulty_cache() as (cache, _):
        blocks = cache.blocks(range(8))
        await cache.store.put(blocks)
        await cache.store.get([meta for meta, _ in blocks])
    assert len(threads) == 4
    assert threading.get_ident() not in threads


# Second chance


async def test_what_is_read_near_the_horizon_is_written_again():
    async with faulty_cache(max_bytes=40 * 1400) as (cache, bus):
        cache.store._refresher._spread = 0.0
        hot = cache.blocks(range(8))
        await cache.store.put(hot)
        for round_ in range(40):
            await cache.store.put(cache.blocks(range(1000 + 16 * round_, 1016 + 16 * round_)))
            await asyncio.sleep(0.04)  # a poll of the horizon
            assert len(await cache.store.get([meta for meta, _ in hot])) == 2, f"evicted in round {round_}"
        assert len(bus.broker.streams[SUBJECTS.block_stream]._records) < 60, "the stream was evicting"
        assert cache.store.counters["refreshed"] >= 2


# Follower


async def test_a_reader_is_woken_when_its_block_is_stored():
    async with faulty_cache() as (cache, _):
        blocks = cache.blocks(range(16))
        names = [meta.name for meta, _ in blocks]
        waiting = asyncio.create_task(cache.follower.wait(names, 5.0))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        began = time.monotonic()
        await cache.store.put(blocks[1:])
        await asyncio.sleep(0.02)
        assert not waiting.done(), "later blocks are of no use without the first"
        await cache.store.put(blocks[:1])
        assert await waiting == 4
        assert time.monotonic() - began < 1
        assert cache.follower._waiting == {}


async def test_waiting_ends_at_the_deadline_and_leaves_nothing_behind():
    async with faulty_cache() as (cache, _):
        names = [meta.name for meta in cache.metas(range(16))]
        results = await asyncio.gather(*(cache.follower.wait(names, t) for t in (0.0, 0.02, 0.02)))
        assert results == [0, 0, 0]
        assert cache.follower._waiting == {}
        assert await cache.follower.wait([], 5.0) == 0


async def test_close_answers_whoever_waits():
    async with faulty_cache() as (cache, _):
        waiting = asyncio.create_task(cache.follower.wait([b"n" * 32], 60.0))
        await asyncio.sleep(0.01)
        await cache.follower.close()
        assert await asyncio.wait_for(waiting, 1.0) == 0


async def test_eviction_becomes_visible():
    async with faulty_cache(max_bytes=10 * 1400) as (cache, _):
        first = cache.blocks(range(16))
        await cache.store.put(first)
        await cache.told([meta for meta, _ in first])
        await cache.store.put(cache.blocks(range(1000, 1040)))
        await eventually(lambda: cache.index.longest([meta.name for meta, _ in first]) == 0)


async def test_a_vanished_stream_is_created_again_and_known_as_empty():
    async with faulty_cache() as (cache, bus):
        blocks = cache.blocks(range(16))
        await cache.store.put(blocks)
        await cache.told([meta for meta, _ in blocks])
        bus.disconnect()
        await asyncio.sleep(0.05)
        bus.broker.wipe_memory_streams()
        bus.reconnect()
        await eventually(lambda: SUBJECTS.block_stream in bus.broker.streams)
        await eventually(lambda: cache.index.longest([meta.name for meta, _ in blocks]) == 0)
        assert await cache.store.put(blocks) == PutReport(stored=4)
        await cache.told([meta for meta, _ in blocks])


async def test_a_stream_that_was_replaced_unseen_and_is_empty_is_known_as_empty():
    async with faulty_cache() as (cache, bus):
        blocks = cache.blocks(range(16))
        await cache.store.put(blocks)
        await cache.told([meta for meta, _ in blocks])
        bus.broker.wipe_memory_streams()
        await bus.ensure_stream(block_stream(SUBJECTS, 64 << 20))
        await eventually(lambda: len(cache.index) == 0)


async def test_an_answer_about_the_stream_before_changes_nothing(monkeypatch):
    """The feed starts over on a new stream while a poll of the old one is under way."""
    async with faulty_cache() as (cache, bus):
        (meta,) = cache.metas(range(4))
        polls = 0

        async def stale(stream: str) -> StreamState:
            nonlocal polls
            polls += 1
            cache.index.reset()
            cache.index.observe(1, meta.name)
            return StreamState(first_seq=100, last_seq=200, messages=100, bytes=0)

        monkeypatch.setattr(bus, "stream_state", stale)
        await eventually(lambda: polls >= 2)
        assert cache.index.present(meta.name)


async def test_the_follower_outlives_a_start_without_a_bus():
    bus = MemoryBus(MemoryBroker())
    bus.disconnect()
    index = PrefixIndex()
    follower = IndexFollower(bus, SUBJECTS, index, block_stream(SUBJECTS, 1 << 20), poll=0.01)
    await follower.start()
    await asyncio.sleep(0.05)
    assert follower.counters["bus_errors"] > 0
    bus.reconnect()
    cache = StreamBlockStore(bus, SUBJECTS, IDENTITY, index)
    await eventually(lambda: SUBJECTS.block_stream in bus.broker.streams)
    meta = frames.metas(b"r" * 32, range(4), 4)[0]
    await cache.put([(meta, payload(meta))])
    assert await follower.wait([meta.name], 5.0) == 1
    await follower.close()
    await bus.close()


async def test_a_stream_with_other_limits_is_refused_at_start():
    async with faulty_cache(max_bytes=1 << 20) as (_, bus):
        follower = IndexFollower(bus, SUBJECTS, PrefixIndex(), block_stream(SUBJECTS, 2 << 20))
        with pytest.raises(ConfigError, match="max_bytes"):
            await follower.start()


@pytest.mark.parametrize(
    "tail", ["t.zz.0", "t.00.0", f"t.{'ab' * 32}.x", f"t.{'AB' * 32}.0", f"t.{'ab' * 32}.01", f"t.{'ab' * 32}.-1"]
)
async def test_foreign_subjects_are_counted_not_indexed(tail):
    async with faulty_cache() as (cache, bus):
        await bus.append(f"{SUBJECTS.prefix}.kv.{tail}", b"junk")
        meta, data = cache.blocks(range(4))[0]
        await cache.store.put([(meta, data)])
        await cache.told([meta])
        assert len(cache.index) == 1
        assert bus.counters["handler_errors"] == 0
        assert cache.follower.counters["foreign_subjects"] + (tail.endswith(".-1")) >= 1


# Set-up


async def test_an_index_that_counts_other_parts_is_refused():
    bus = MemoryBus(MemoryBroker(), max_payload=50_000)
    big = IDENTITY.model_copy(update={"block_bytes": 100_000})
    with pytest.raises(ConfigError, match="parts"):
        StreamBlockStore(bus, SUBJECTS, big, PrefixIndex())


def test_the_stream_never_takes_a_message_that_would_empty_it():
    assert block_stream(SUBJECTS, 1 << 20).max_msg_size == 1 << 20
    assert frames.MAX_FRAME < block_stream(SUBJECTS, 1 << 30).max_msg_size < 8 << 20
