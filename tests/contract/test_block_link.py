"""What `shared.bus.block_link` promises, held against a link over the bus in memory and one on NATS."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import anyio
import pytest

from shared.bus.base import Bus, StreamSpec
from shared.bus.block_link import BlockLink, Item, Reader
from shared.bus.bulk_stream import StreamLink
from shared.bus.bus_link import BusLink
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import (
    BusDisconnected,
    BusError,
    FrameError,
    SequenceConflict,
    StreamMissing,
    TooLarge,
    TrineError,
)
from tests.contract.conftest import MAX_PAYLOAD, World

pytestmark = pytest.mark.anyio


@dataclass
class Rig:
    """A link, used from threads, and a stream that captures `<name>.b.*`."""

    link: BlockLink
    bus: Bus
    name: str

    @property
    def stream(self) -> str:
        return f"{self.name}-B"

    @property
    def spec(self) -> StreamSpec:
        return StreamSpec(self.stream, (f"{self.name}.b.*",), max_bytes=64 << 20, max_msgs_per_subject=1)

    def subject(self, key: object) -> str:
        return f"{self.name}.b.{key}"

    async def put(self, *items: Item, timeout: float = 5.0) -> list[int | TrineError]:
        return await asyncio.to_thread(self.link.put, items, time.monotonic() + timeout)

    async def get(self, keys: Sequence[object], timeout: float = 5.0) -> dict[str, bytes]:
        found: dict[str, bytes] = {}

        def receive(subject: str, seq: int, size: int, reader: Reader) -> None:
            assert subject not in found
            assert seq > 0
            assert size == reader.left
            found[subject.rpartition(".")[2]] = reader.exactly(size)

        subjects = [self.subject(key) for key in keys]
        await asyncio.to_thread(self.link.get, self.stream, subjects, receive, time.monotonic() + timeout)
        return found


@pytest.fixture
async def rig(request: pytest.FixtureRequest, world: World, bus: Bus) -> AsyncIterator[Rig]:
    link: BlockLink
    if "nats" in request.node.callspec.id:
        link = StreamLink(request.getfixturevalue("nats_server").url, world.name)
    else:
        link = BusLink(bus, asyncio.get_running_loop())
    made = Rig(link, bus, world.name)
    await bus.ensure_stream(made.spec)
    yield made
    link.close()


async def test_what_was_put_is_got(rig: Rig) -> None:
    pieces = (b"head", memoryview(b"body" * 1000)[4:], b"", memoryview(bytearray(b"tail")))
    sequences = await rig.put(Item(rig.subject("a"), pieces), Item(rig.subject("b"), ()))
    assert sequences == [1, 2]
    assert await rig.get(["a", "b"]) == {"a": b"".join(pieces), "b": b""}
    assert (await rig.bus.get_many(rig.stream, [rig.subject("a")]))[rig.subject("a")].data == b"".join(pieces)


async def test_many_are_put_and_got_in_order_of_sequence(rig: Rig) -> None:
    keys = list(range(300))
    answers = await rig.put(*(Item(rig.subject(k), (str(k).encode() * 50,)) for k in keys))
    assert sorted(a for a in answers if isinstance(a, int)) == list(range(1, 301))
    got = await rig.get([*reversed(keys), 7, 7])
    assert list(got) == [str(k) for k in keys]
    assert all(got[str(k)] == str(k).encode() * 50 for k in keys)


async def test_missing_ones_are_left_out(rig: Rig) -> None:
    await rig.put(Item(rig.subject("there"), (b"x",)))
    assert await rig.get(["none", "there", "nothing"]) == {"there": b"x"}
    assert await rig.get(["none"]) == {}
    assert await rig.get([]) == {}
    assert await rig.put() == []


async def test_put_if_absent_and_replace(rig: Rig) -> None:
    a = rig.subject("a")
    (first,) = await rig.put(Item(a, (b"1",)))
    conflict, other = await rig.put(Item(a, (b"2",)), Item(rig.subject("b"), (b"b",)))
    assert isinstance(conflict, SequenceConflict)
    assert isinstance(other, int)
    assert await rig.get(["a"]) == {"a": b"1"}
    assert isinstance(first, int)
    (replaced,) = await rig.put(Item(a, (b"3",), expect_last=first))
    assert isinstance(replaced, int)
    assert await rig.get(["a"]) == {"a": b"3"}
    (late,) = await rig.put(Item(a, (b"4",), expect_last=first))
    assert isinstance(late, SequenceConflict)


async def test_what_is_too_large_is_refused_alone(rig: Rig) -> None:
    limited = replace(rig.spec, name=f"{rig.name}-L", subjects=(f"{rig.name}.limited.*",), max_msg_size=1000)
    await rig.bus.ensure_stream(limited)
    before, bus, stream, after = await rig.put(
        Item(rig.subject("before"), (b"x",)),
        Item(rig.subject("large"), (bytes(MAX_PAYLOAD // 2), bytes(MAX_PAYLOAD // 2))),
        Item(f"{rig.name}.limited.a", (bytes(2000),)),
        Item(rig.subject("after"), (b"y",)),
    )
    assert isinstance(bus, TooLarge)
    assert isinstance(stream, TooLarge)
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert await rig.get(["before", "large", "after"]) == {"before": b"x", "after": b"y"}


async def test_without_a_stream(rig: Rig) -> None:
    elsewhere, here = await rig.put(Item(f"{rig.name}.other.a", (b"x",)), Item(rig.subject("a"), (b"y",)))
    assert isinstance(elsewhere, StreamMissing)
    assert isinstance(here, int)
    with pytest.raises(StreamMissing):
        await asyncio.to_thread(rig.link.get, f"{rig.name}-none", ["a"], print, time.monotonic() + 5)


async def test_a_receiver_takes_a_payload_in_place_as_far_as_it_likes(rig: Rig) -> None:
    await rig.put(*(Item(rig.subject(i), (b"head", bytes([i]) * 100_000)) for i in range(6)))
    places = [bytearray(100_000) for _ in range(6)]

    def receive(subject: str, seq: int, size: int, reader: Reader) -> None:
        number = int(subject[-1])
        assert size == 100_004
        if number == 1:
            return
        assert reader.exactly(4) == b"head"
        if number == 2:
            reader.into(memoryview(places[2])[:10])
        elif number == 3:
            raise FrameError("not what was asked for")
        elif number == 4:
            reader.into(memoryview(places[4]))
            assert reader.left == 0
            reader.into(memoryview(b""))
            reader.exactly(1)  # there is no more
            raise AssertionError("read beyond the end")
        else:
            reader.into(memoryview(places[number]).cast("B", (100, 1000)))

    subjects = [rig.subject(i) for i in range(6)]
    await asyncio.to_thread(rig.link.get, rig.stream, subjects, receive, time.monotonic() + 5)
    full, none = [i for i, p in enumerate(places) if p == bytes([i]) * 100_000], [bytes(p) for p in places]
    assert full == [0, 4, 5]
    assert not any(none[1]) and not any(none[3])
    assert none[2] == bytes([2]) * 10 + bytes(99_990)


async def test_an_error_of_the_receiver_ends_the_call_and_not_the_link(rig: Rig) -> None:
    await rig.put(*(Item(rig.subject(i), (bytes(1000),)) for i in range(5)))
    seen: list[str] = []

    def receive(subject: str, seq: int, size: int, reader: Reader) -> None:
        seen.append(subject)
        reader.exactly(10)
        raise LookupError("a bug")

    subjects = [rig.subject(i) for i in range(5)]
    with pytest.raises(LookupError, match="a bug"):
        await asyncio.to_thread(rig.link.get, rig.stream, subjects, receive, time.monotonic() + 5)
    assert len(seen) == 1
    assert len(await rig.get(range(5))) == 5


async def test_after_the_deadline_nothing_is_tried(rig: Rig) -> None:
    answers = await rig.put(Item(rig.subject("a"), (b"x",)), Item(rig.subject("b"), (b"x",)), timeout=-1)
    assert [type(a) for a in answers] == [BusDisconnected, BusDisconnected]
    with pytest.raises(BusDisconnected):
        await rig.get(["a"], timeout=-1)
    assert await rig.get(["a", "b"]) == {}


async def test_a_server_that_dies_and_comes_back(rig: Rig, world: World) -> None:
    await rig.put(Item(rig.subject("a"), (b"x",)))
    await world.outage()
    started = time.monotonic()
    (answer,) = await rig.put(Item(rig.subject("b"), (b"y",)))
    assert isinstance(answer, BusDisconnected)
    with pytest.raises(BusDisconnected):
        await rig.get(["a"])
    assert time.monotonic() - started < 2
    await world.recovery()
    with anyio.fail_after(3):  # a moment after a failure, nothing is tried
        while isinstance((await rig.put(Item(rig.subject("c"), (b"z",))))[0], BusDisconnected):
            await anyio.sleep(0.05)
    (answer,) = await rig.put(Item(rig.subject("c"), (b"z",)))
    assert isinstance(answer, StreamMissing)
    await rig.bus.ensure_stream(rig.spec)
    (answer,) = await rig.put(Item(rig.subject("c"), (b"z",)))
    assert isinstance(answer, int)
    assert await rig.get(["a", "c"]) == {"c": b"z"}


async def test_a_closed_link_stays_closed(rig: Rig) -> None:
    await rig.put(Item(rig.subject("a"), (b"x",)))
    rig.link.close()
    rig.link.close()
    (answer,) = await rig.put(Item(rig.subject("b"), (b"y",)))
    assert isinstance(answer, BusDisconnected)
    with pytest.raises(BusError):
        await rig.get(["a"])


async def test_a_link_that_is_closed_while_it_waits_leaves_no_error_behind() -> None:
    """The bus is closed at the same moment, so what the link waited for ends with an error that nobody asks for."""
    left: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: left.append(context))
    try:
        for turns in range(6):
            bus = MemoryBus(MemoryBroker())
            link = BusLink(cast("Bus", bus), loop)
            asked = asyncio.create_task(asyncio.to_thread(link.get, "none", ["a"], print, time.monotonic() + 5))
            while link._waiting is None:
                await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)
            await bus.close()
            link.close()
            with pytest.raises((BusDisconnected, StreamMissing)):
                await asked
        gc.collect()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)
    assert left == []
