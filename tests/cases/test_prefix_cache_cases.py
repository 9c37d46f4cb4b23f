"""Failure cases of prefix caches met in the field, at the level of the shared cache.

What needs a model or several processes (texts equal to the reference) is tested end to end elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from shared.bus.base import Stored
from shared.bus.memory import MemoryBroker
from shared.cache import frames, naming
from shared.cache.blocks import BlockAllocator
from shared.cache.frames import BlockMeta
from shared.cache.store import PutReport
from shared.errors import ConfigError
from tests.cache_rig import IDENTITY, SUBJECTS, Cache, FaultyBus, eventually, faulty_cache, payload, right

pytestmark = pytest.mark.anyio


async def stored(cache: Cache, token_ids: range, tenant: str = "t") -> list[BlockMeta]:
    """Store the blocks of `token_ids`; returns when the index knows them."""
    blocks = cache.blocks(token_ids, tenant)
    report = await cache.store.put(blocks)
    assert report.failed == 0
    metas = [meta for meta, _ in blocks]
    await cache.told(metas)
    return metas


async def test_case_1_names_that_collide_are_rejected_by_their_tokens(monkeypatch):
    """With keys cut to 8 bits almost every name is somebody else's; what comes back is right or is nothing."""
    full = naming.child
    monkeypatch.setattr(naming, "child", lambda parent, ids: full(parent, ids)[:1] * 32)
    rng = random.Random(1)
    async with faulty_cache() as (cache, _):
        prompts = [[rng.randrange(50_000) for _ in range(16)] for _ in range(500)]
        for _ in range(2):
            for prompt in prompts:
                metas = cache.metas(prompt)
                by_name = {m.name: m for m in metas}
                for name, data in (await cache.store.get(metas)).items():
                    meta = by_name[name]
                    assert bytes(data[:16]) == struct.pack("<4I", *meta.token_ids), "another prompt's block"
                await cache.store.put(
                    [(m, memoryview(struct.pack("<4I", *m.token_ids) + bytes(984))) for m in metas], timeout=5.0
                )
        assert cache.store.counters["reject"] > 100
        assert await cache.store.get(cache.metas(prompts[-1])), "what was stored last is found"


def test_case_1_names_are_cryptographic_digests():
    names = naming.chain(naming.root(IDENTITY, "t"), list(range(4000)), 4)
    assert {len(name) for name in names} == {32}
    assert len({name[:8] for name in names}) == 1000


def test_case_2_every_process_gives_the_same_names():
    code = (
        "from shared.cache import naming\nfrom shared.messages import Identity\n"
        "i = Identity(fingerprint='f' * 64, codec='none', block_size=4, block_bytes=1000)\n"
        "print(naming.chain(naming.root(i, 't'), range(64), 4)[-1].hex())"
    )
    names = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed}, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2", "random")
    }  # fmt: skip
    assert len(names) == 1


async def test_case_3_tenants_never_share():
    async with faulty_cache() as (cache, _):
        await stored(cache, range(32), tenant="a")
        assert len(await cache.store.get(cache.metas(range(32), tenant="a"))) == 8
        others = cache.metas(range(32), tenant="b")
        assert await cache.store.get(others) == {}
        assert cache.index.longest([meta.name for meta in others]) == 0


@pytest.mark.parametrize("tenant", ["", "a\0b", "ä" * 1000, "*", "a.b"])
async def test_case_4_no_tenant_name_reaches_another(tenant):
    async with faulty_cache() as (cache, _):
        await stored(cache, range(8), tenant="a")
        assert await cache.store.get(cache.metas(range(8), tenant=tenant)) == {}
        assert len(await cache.store.get(cache.metas(range(8), tenant="a"))) == 2


@pytest.mark.parametrize(
    "changed",
    [{"fingerprint": "e" * 64}, {"codec": "int8"}, {"block_size": 8}, {"block_bytes": 500}],
    ids=lambda change: next(iter(change)),
)
async def test_cases_6_7_63_another_identity_hits_nothing(changed):
    """New weights, KV type, block size or layout on the same stream: cold, and the old blocks still serve the old."""
    broker = MemoryBroker()
    other = IDENTITY.model_copy(update=changed)
    async with faulty_cache(broker=broker) as (old, _), faulty_cache(other, broker=broker) as (new, _):
        metas = await stored(old, range(32))
        assert await new.store.get(new.metas(range(32))) == {}
        assert new.index.longest([m.name for m in new.metas(range(32))]) == 0
        assert len(await old.store.get(metas)) == 8


async def test_case_63_a_block_of_another_codec_under_a_valid_name_is_not_used():
    broker = MemoryBroker()
    other = IDENTITY.model_copy(update={"codec": "int8"})
    async with faulty_cache(broker=broker) as (ours, _), faulty_cache(other, broker=broker) as (theirs, _):
        metas = ours.metas(range(4))
        await theirs.store.put([(metas[0], payload(metas[0]))])
        assert await ours.store.get(metas) == {}
        assert ours.store.counters["reject"] == 1


@pytest.mark.parametrize("blocks", [2, 3, 5])
async def test_case_8_a_prompt_of_whole_blocks_is_cached_whole(blocks):
    """Three times the same prompt of n * B tokens: the same n blocks; what of them to use is the reader's choice."""
    async with faulty_cache() as (cache, _):
        metas = await stored(cache, range(4 * blocks))
        for _ in range(3):
            fetched = await cache.store.get(metas)
            assert list(fetched) == [meta.name for meta in metas]
            assert right(fetched)


async def test_case_9_unfull_blocks_have_no_name():
    async with faulty_cache() as (cache, _):
        lengths = {n: len(cache.metas(range(n))) for n in (0, 1, 3, 4, 5, 7, 8, 9)}
        assert lengths == {0: 0, 1: 0, 3: 0, 4: 1, 5: 1, 7: 1, 8: 2, 9: 2}


async def test_case_11_a_block_is_seen_only_after_it_was_stored_whole():
    """A reader that polls as hard as it can never sees a part of a block or other bytes."""
    identity = IDENTITY.model_copy(update={"block_bytes": 150_000})
    async with faulty_cache(identity, max_payload=50_000) as (cache, bus):
        bus.delay = 0.001
        for round_ in range(20):
            blocks = cache.blocks(range(100 * round_, 100 * round_ + 16))
            metas = [meta for meta, _ in blocks]
            writing = asyncio.create_task(cache.store.put(blocks))
            seen = 0
            while seen < 4:
                fetched = await cache.store.get(metas)
                assert right(fetched, identity)
                seen = len(fetched)
            assert (await writing).failed == 0


@pytest.mark.parametrize("hole", [2, 0])
async def test_case_13_blocks_behind_a_hole_do_not_count(hole):
    async with faulty_cache() as (cache, bus):
        metas = await stored(cache, range(24))
        names = [meta.name for meta in metas]
        stream = bus.broker.streams[SUBJECTS.block_stream]
        stream.remove(stream.last_of(SUBJECTS.block(names[hole])))
        fetched = await cache.store.get(metas)
        assert set(fetched) == set(names) - {names[hole]}
        assert cache.index.longest(names) == hole


def test_case_13_the_local_index_stops_at_a_hole_too():
    allocator = BlockAllocator(6, 4)
    names = naming.chain(b"r" * 32, range(24), 4)
    blocks = allocator.allocate(6)
    for block, name in zip(blocks, names, strict=True):
        allocator.commit(block, name)
    for hole in (2, 0):
        allocator.drop(names[hole])
        assert allocator.match(names) == blocks[:hole]
        allocator.check_integrity()


async def test_case_14_eviction_while_reading_is_a_miss_never_other_bytes():
    """The stream holds 1.2 prompts; two prompts are written and read at once, each step delayed."""
    async with faulty_cache(max_bytes=12 * 1400) as (cache, bus):
        bus.delay = 0.003
        rng = random.Random(3)

        async def client(tag: int) -> int:
            hits = 0
            for _ in range(15):
                blocks = cache.blocks(range(1000 * tag, 1000 * tag + 40))
                metas = [meta for meta, _ in blocks]
                report = await cache.store.put(blocks)
                assert report.stored + report.existed == 10
                await asyncio.sleep(rng.random() * 0.005)
                fetched = await cache.store.get(metas)
                assert right(fetched)
                assert set(fetched) <= {meta.name for meta in metas}
                hits += len(fetched)
            return hits

        hits = await asyncio.gather(client(1), client(2))
        assert 0 < sum(hits) < 300, "some hits, some misses, no errors"


async def test_case_14_a_cached_block_in_use_is_never_given_away():
    allocator = BlockAllocator(4, 4)
    names = naming.chain(b"r" * 32, range(8), 4)
    mine = allocator.allocate(2)
    for block, name in zip(mine, names, strict=True):
        allocator.commit(block, name)
    reader = allocator.match(names)
    allocator.release(mine)
    assert not set(allocator.allocate(2)) & set(reader)


async def test_case_17_a_flushed_cache_is_known_as_empty():
    async with faulty_cache() as (cache, bus):
        metas = await stored(cache, range(32))
        stream = bus.broker.streams[SUBJECTS.block_stream]
        for record in list(stream.after(0)):
            stream.remove(record.seq)
        await eventually(lambda: cache.index.longest([m.name for m in metas]) == 0)
        assert await cache.store.put(cache.blocks(range(32))) == PutReport(stored=8)


def _flip(message: Stored) -> Stored:
    data = bytearray(message.data)
    data[-1] ^= 1
    return replace(message, data=bytes(data))


def _header_flip(message: Stored) -> Stored:
    data = bytearray(message.data)
    data[20] ^= 1
    return replace(message, data=bytes(data))


DAMAGE = {
    "one bit flipped": _flip,
    "one header bit flipped": _header_flip,
    "truncated": lambda m: replace(m, data=m.data[:-10]),
    "only the head": lambda m: replace(m, data=m.data[:64]),
    "empty": lambda m: replace(m, data=b""),
    "bytes added": lambda m: replace(m, data=m.data + b"\0"),
    "garbage": lambda m: replace(m, data=os.urandom(len(m.data))),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
async def test_case_58_a_damaged_block_is_rejected_and_counted(damage):
    async with faulty_cache() as (cache, bus):
        metas = await stored(cache, range(32))
        victim = SUBJECTS.block(metas[3].name)
        bus.damage = lambda m: damage(m) if m.subject == victim else m
        fetched = await cache.store.get(metas)
        assert set(fetched) == {m.name for m in metas} - {metas[3].name}
        assert right(fetched)
        assert cache.store.counters["reject"] == 1
        assert cache.store.counters["miss"] == 1
        assert cache.index.longest([m.name for m in metas]) == 3


async def test_case_58_two_blocks_swapped_are_both_rejected():
    async with faulty_cache() as (cache, bus):
        metas = await stored(cache, range(16))
        records = {
            m.subject: m
            for m in (await bus.get_many(SUBJECTS.block_stream, [SUBJECTS.block(x.name) for x in metas])).values()
        }
        a, b = (SUBJECTS.block(meta.name) for meta in metas[:2])
        swap = {a: records[b].data, b: records[a].data}
        bus.damage = lambda m: replace(m, data=swap.get(m.subject, m.data))
        assert set(await cache.store.get(metas)) == {m.name for m in metas[2:]}
        assert cache.store.counters["reject"] == 2


async def test_case_58_a_dropped_block_is_a_miss_and_a_late_one_too():
    async with faulty_cache() as (cache, bus):
        metas = await stored(cache, range(16))
        bus.damage = lambda m: None if m.subject == SUBJECTS.block(metas[1].name) else m
        assert len(await cache.store.get(metas)) == 3
        bus.damage, bus.delay = None, 60.0
        assert await cache.store.get(metas, timeout=0.05) == {}
        assert cache.store.counters["reject"] == 0


async def test_case_58_a_block_that_is_damaged_in_the_stream_is_replaced():
    """Otherwise put-if-absent would leave it there, a miss for everybody until it is evicted."""
    async with faulty_cache() as (cache, bus):
        (meta,) = cache.metas(range(4))
        await bus.append(SUBJECTS.block(meta.name), b"damaged")
        await cache.told([meta])
        assert await cache.store.get([meta]) == {}
        assert await cache.store.put(cache.blocks(range(4))) == PutReport(stored=1)
        assert right(await cache.store.get([meta]))
        assert cache.store.counters["hit"] == 1


@pytest.mark.parametrize("size", [65_536 - 4096 - 64, 65_536 - 4096, 65_536, 300_000])
async def test_case_67_blocks_larger_than_max_payload_are_cut(size):
    identity = IDENTITY.model_copy(update={"block_bytes": size})
    async with faulty_cache(identity, max_payload=65_536 - 4096) as (cache, bus):
        metas = await stored(cache, range(8))
        fetched = await cache.store.get(metas)
        assert len(fetched) == 2
        assert right(fetched, identity)
        assert bus.counters["reconnects"] == 0


async def test_case_67_a_bus_too_small_for_frames_is_refused_at_start():
    with pytest.raises(ConfigError, match="max_payload"):
        async with faulty_cache(max_payload=8192):
            pass


async def test_case_74_a_stream_smaller_than_a_prompt_only_misses():
    async with faulty_cache(max_bytes=3 * 1400) as (cache, _):
        blocks = cache.blocks(range(400))
        assert (await cache.store.put(blocks)).failed == 0
        fetched = await cache.store.get([meta for meta, _ in blocks])
        assert 0 < len(fetched) <= 4
        assert right(fetched)


async def test_case_82_other_bytes_under_a_valid_name_with_a_false_digest():
    async with faulty_cache() as (cache, bus):
        (meta,) = cache.metas(range(4))
        ((head, _),) = frames.encode(meta, payload(meta), IDENTITY, frames.PART_BYTES)
        await bus.append(SUBJECTS.block(meta.name), head + os.urandom(1000))
        assert await cache.store.get([meta]) == {}
        assert cache.store.counters["reject"] == 1


async def test_case_126_a_pickle_in_the_stream_is_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "pwned"), "w"))

    async with faulty_cache() as (cache, bus):
        metas = cache.metas(range(12))
        bomb = pickle.dumps(Bomb())
        for meta, data in zip(
            metas, (bomb, b"TRKV" + struct.pack("<I", len(bomb)) + bomb, b"PK\3\4" + bomb), strict=True
        ):
            await bus.append(SUBJECTS.block(meta.name), data)
        assert await cache.store.get(metas) == {}
        assert cache.store.counters["reject"] == 3
        assert not (tmp_path / "pwned").exists()
        assert right(await cache.store.get(await stored(cache, range(100, 116))))


@pytest.mark.parametrize(
    "changes",
    [
        {"block_bytes": 2**62},
        {"parts": 2**31},
        {"length": 2**63},
        {"offset": 2**62},
        {"v": 99},
        {"tokens": b"\xff" * 8000},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_case_127_hostile_headers_take_no_memory(changes):
    async with faulty_cache() as (cache, bus):
        (meta,) = cache.metas(range(4))
        ((head, body),) = frames.encode(meta, payload(meta), IDENTITY, frames.PART_BYTES)
        (size,) = struct.unpack_from("<I", head, 4)
        packed = msgpack.packb(msgpack.unpackb(head[8 : 8 + size]) | changes)
        start = b"TRKV" + struct.pack("<I", len(packed)) + packed
        await bus.append(SUBJECTS.block(meta.name), start + bytes(-len(start) % 64) + bytes(body))
        assert await cache.store.get([meta]) == {}
        assert cache.store.counters["reject"] == 1


async def test_a_worker_that_starts_late_learns_what_is_there():
    broker = MemoryBroker()
    async with faulty_cache(broker=broker) as (first, _):
        metas = await stored(first, range(32))
        async with faulty_cache(broker=broker) as (second, bus):
            assert isinstance(bus, FaultyBus)
            await second.told(metas)
            assert right(await second.store.get(metas))
            assert second.store.counters["hit"] == 8
