"""What `shared.bus.base` promises, held against the bus in memory and the one on NATS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from shared.bus.base import Bus, ConsumerSpec, Handler, Incoming, Stored, StreamSpec, StreamState
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import (
    BusDisconnected,
    BusError,
    ConfigError,
    InvalidField,
    SequenceConflict,
    StreamFull,
    StreamMissing,
    TooLarge,
)
from tests.contract.conftest import World, eventually

pytestmark = pytest.mark.anyio


def collect(into: list[Incoming]) -> Handler:
    async def handler(message: Incoming) -> None:
        into.append(message)

    return handler


async def stream(bus: Bus, world: World, **limits: Any) -> str:
    """A stream capturing `<world.name>.s.>`; returns its name."""
    await bus.ensure_stream(replace(StreamSpec(name=f"{world.name}-S", subjects=(f"{world.name}.s.>",)), **limits))
    return f"{world.name}-S"


async def queue(bus: Bus, world: World, **options: Any) -> tuple[str, str, str]:
    """A work queue in a file with one consumer; returns (stream, consumer, subject)."""
    name, subject = f"{world.name}-Q", f"{world.name}.q.jobs"
    await bus.ensure_stream(StreamSpec(name, (f"{world.name}.q.>",), "workqueue", "file", "new"))
    await bus.ensure_consumer(replace(ConsumerSpec(name, "work", (f"{world.name}.q.*",), ack_wait=5), **options))
    return name, "work", subject


class TestCore:
    async def test_a_message_arrives_whole(self, bus: Bus, other: Bus, world: World) -> None:
        got: list[Incoming] = []
        await other.subscribe(f"{world.name}.a.*", collect(got))
        await bus.publish(f"{world.name}.a.b", b"\x00data", {"Kind": "test"}, reply="answer.here")
        await eventually(lambda: len(got) == 1)
        assert got == [Incoming(f"{world.name}.a.b", b"\x00data", "answer.here", {"Kind": "test"})]

    async def test_messages_are_handled_in_order_and_one_at_a_time(self, bus: Bus, other: Bus, world: World) -> None:
        got: list[int] = []
        running = 0

        async def handler(message: Incoming) -> None:
            nonlocal running
            running += 1
            assert running == 1
            await anyio.lowlevel.checkpoint()
            got.append(int(message.data))
            running -= 1

        await other.subscribe(f"{world.name}.a", handler)
        for i in range(300):
            await bus.publish(f"{world.name}.a", str(i).encode())
        await eventually(lambda: len(got) == 300)
        assert got == list(range(300))
        assert other.counters["handler_errors"] == 0

    async def test_subscribers_of_a_queue_group_share(self, bus: Bus, other: Bus, world: World) -> None:
        first: list[Incoming] = []
        second: list[Incoming] = []
        everything: list[Incoming] = []
        await bus.subscribe(f"{world.name}.a", collect(first), queue="g")
        await other.subscribe(f"{world.name}.a", collect(second), queue="g")
        await other.subscribe(f"{world.name}.>", collect(everything))
        for i in range(60):
            await bus.publish(f"{world.name}.a", str(i).encode())
        await eventually(lambda: len(first) + len(second) == 60 and len(everything) == 60)
        assert first
        assert second
        assert {m.data for m in first + second} == {m.data for m in everything}

    async def test_an_unsubscribed_handler_gets_nothing(self, bus: Bus, world: World) -> None:
        got: list[Incoming] = []
        kept: list[Incoming] = []
        sub = await bus.subscribe(f"{world.name}.a", collect(got))
        await bus.subscribe(f"{world.name}.a", collect(kept))
        await sub.unsubscribe()
        await sub.unsubscribe()
        await bus.publish(f"{world.name}.a", b"")
        await eventually(lambda: len(kept) == 1)
        assert not got

    async def test_a_handler_may_unsubscribe_itself_and_finish(self, bus: Bus, world: World) -> None:
        finished: list[bytes] = []

        async def once(message: Incoming) -> None:
            await sub.unsubscribe()
            await anyio.sleep(0.01)
            finished.append(message.data)

        sub = await bus.subscribe(f"{world.name}.a", once)
        kept: list[Incoming] = []
        await bus.subscribe(f"{world.name}.a", collect(kept))
        for data in (b"1", b"2"):
            await bus.publish(f"{world.name}.a", data)
        await eventually(lambda: len(kept) == 2 and finished == [b"1"])
        await anyio.sleep(0.05)
        assert finished == [b"1"]

    @pytest.mark.parametrize("error", [ValueError("broken"), asyncio.CancelledError()])
    async def test_a_raising_handler_is_counted_and_goes_on(
        self, bus: Bus, world: World, logs: list[MutableMapping[str, Any]], error: BaseException
    ) -> None:
        got: list[bytes] = []

        async def handler(message: Incoming) -> None:
            if message.data == b"bad":
                raise error
            got.append(message.data)

        await bus.subscribe(f"{world.name}.a", handler)
        for data in (b"bad", b"good"):
            await bus.publish(f"{world.name}.a", data)
        await eventually(lambda: got == [b"good"])
        assert bus.counters["handler_errors"] == 1
        assert [(e["log_level"], e["subject"]) for e in logs if "handler" in e["event"]] == [
            ("error", f"{world.name}.a")
        ]

    async def test_request_and_reply(self, bus: Bus, other: Bus, world: World) -> None:
        async def answer(message: Incoming) -> None:
            await other.publish(message.reply, message.data.upper(), {**message.headers, "By": "other"})

        await other.subscribe(f"{world.name}.ask", answer)
        answers = await asyncio.gather(*(bus.request(f"{world.name}.ask", b"q%d" % i, 2) for i in range(20)))
        assert [a.data for a in answers] == [b"Q%d" % i for i in range(20)]
        assert answers[0].headers == {"By": "other"}
        told = await bus.request(f"{world.name}.ask", b"", 2, {"Told": "so"})
        assert told.headers == {"By": "other", "Told": "so"}

    async def test_a_request_that_nobody_hears_fails_at_once(self, bus: Bus, world: World) -> None:
        start = time.monotonic()
        with pytest.raises(BusDisconnected, match="nobody"):
            await bus.request(f"{world.name}.ask", b"", 5)
        assert time.monotonic() - start < 1

    async def test_a_request_without_an_answer_ends_in_time(self, bus: Bus, world: World) -> None:
        await bus.subscribe(f"{world.name}.ask", collect([]))
        start = time.monotonic()
        with pytest.raises(BusDisconnected):
            await bus.request(f"{world.name}.ask", b"", 0.1)
        assert time.monotonic() - start < 1

    async def test_the_largest_payload_passes_and_a_larger_one_is_refused(self, bus: Bus, world: World) -> None:
        name = await stream(bus, world)
        got: list[Incoming] = []
        await bus.subscribe(f"{world.name}.>", collect(got))
        largest = b"x" * bus.max_payload
        await bus.publish(f"{world.name}.a", largest)
        await bus.append(f"{world.name}.s.a", largest, expect_last=0, message_id="m" * 1024)
        await eventually(lambda: len(got) == 2)
        for send in (
            bus.publish(f"{world.name}.a", largest + b"x"),
            bus.publish(f"{world.name}.a", largest, {"K": "v"}),
            bus.append(f"{world.name}.s.b", largest + b"x"),
            bus.append(f"{world.name}.s.b", largest, headers={"K": "v"}),
            bus.append(f"{world.name}.s.b", b"", headers={"K": "v" * bus.max_payload}),
            bus.append(f"{world.name}.s.b", b"", message_id="m" * 1025),
            bus.request(f"{world.name}.a", largest + b"x", 1),
            bus.publish(f"{world.name}.a", bytes(20 << 20)),
        ):
            with pytest.raises(TooLarge):
                await send
        await bus.publish(f"{world.name}.a", b"still here")
        await eventually(lambda: got[-1].data == b"still here")
        assert bus.counters["reconnects"] == 0
        assert (await bus.stream_state(name)).messages == 1

    async def test_without_credentials_nobody_is_authenticated(self, bus: Bus) -> None:
        assert not bus.authenticated

    async def test_a_broker_in_memory_may_be_one_that_asks_for_credentials(self) -> None:
        assert MemoryBus(MemoryBroker(authenticated=True)).authenticated

    async def test_a_closed_bus_refuses_everything(self, bus: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world)
        await bus.close()
        await bus.close()
        assert not bus.connected
        await refuses_everything(bus, name, consumer, subject)


async def refuses_everything(bus: Bus, name: str, consumer: str, subject: str) -> None:
    for attempt in (
        bus.publish(subject, b""),
        bus.request(subject, b"", 1),
        bus.subscribe(subject, collect([])),
        bus.append(subject, b""),
        bus.pull(name, consumer, 1, 0.1),
        bus.get_many(name, [subject]),
        bus.read(name, subject),
        bus.stream_state(name),
        bus.stream_of(subject),
        bus.follow(name, subject, lambda _: None),
        bus.ensure_stream(StreamSpec("X", ("x",))),
        bus.ensure_consumer(ConsumerSpec(name, "x", ("x",))),
        bus.subject_counts(name, ">"),
        bus.purge(name, ">"),
    ):
        start = time.monotonic()
        with pytest.raises(BusDisconnected):
            await attempt
        assert time.monotonic() - start < 1


class TestStreams:
    async def test_ensure_is_idempotent_and_survives_a_race(self, bus: Bus, other: Bus, world: World) -> None:
        spec = StreamSpec(f"{world.name}-S", (f"{world.name}.s.>", f"{world.name}.r"), max_bytes=10_000, max_age=60)
        await asyncio.gather(*(b.ensure_stream(spec) for b in (bus, other, bus, other)))
        await bus.ensure_stream(spec)
        consumer = ConsumerSpec(f"{world.name}-Q", "work", (f"{world.name}.q.*",))
        await queue(bus, world)
        await asyncio.gather(*(b.ensure_consumer(replace(consumer, ack_wait=5)) for b in (bus, other)))

    async def test_a_stream_that_differs_is_a_config_error(self, bus: Bus, world: World) -> None:
        spec = StreamSpec(f"{world.name}-S", (f"{world.name}.s.>",), max_bytes=10_000, max_age=60)
        await bus.ensure_stream(spec)
        with pytest.raises(ConfigError) as caught:
            await bus.ensure_stream(replace(spec, max_bytes=20_000, max_age=30, discard="new"))
        for part in (spec.name, "max_bytes is 10000, expected 20000", "max_age is 60", "discard is old, expected new"):
            assert part in caught.value.message
        assert "storage" not in caught.value.message

    async def test_a_consumer_that_differs_is_a_config_error(self, bus: Bus, world: World) -> None:
        name, consumer, _ = await queue(bus, world)
        with pytest.raises(ConfigError, match="ack_wait is 5") as caught:
            await bus.ensure_consumer(ConsumerSpec(name, consumer, (f"{world.name}.q.*",), ack_wait=7, max_deliver=3))
        assert "max_deliver is -1, expected 3" in caught.value.message
        assert name in caught.value.message

    async def test_the_filters_of_a_consumer_are_compared_whatever_their_order(self, bus: Bus, world: World) -> None:
        name, consumer, _ = await queue(bus, world)
        await bus.ensure_consumer(ConsumerSpec(name, consumer, (f"{world.name}.q.*",)))
        wider = ConsumerSpec(name, consumer, (f"{world.name}.q.*", f"{world.name}.q.x.*"))
        with pytest.raises(ConfigError, match="filter_subjects is"):
            await bus.ensure_consumer(wider)
        two = ConsumerSpec(name, "two", (f"{world.name}.q.y.*", f"{world.name}.q.x.*"))
        await bus.ensure_consumer(two)
        await bus.ensure_consumer(replace(two, filter_subjects=two.filter_subjects[::-1]))
        with pytest.raises(ConfigError, match="filter_subjects is"):
            await bus.ensure_consumer(replace(two, filter_subjects=two.filter_subjects[:1]))
        for bad in ((f"{world.name}.q.z.*", f"{world.name}.q.z.a"), ()):
            with pytest.raises(ConfigError):
                await bus.ensure_consumer(ConsumerSpec(name, "bad", bad))

    async def test_overlapping_subjects_are_a_config_error(self, bus: Bus, world: World) -> None:
        await stream(bus, world)
        with pytest.raises(ConfigError, match="overlap"):
            await bus.ensure_stream(StreamSpec(f"{world.name}-S2", (f"{world.name}.*.x",)))

    async def test_a_consumer_needs_its_stream(self, bus: Bus, world: World) -> None:
        with pytest.raises(StreamMissing):
            await bus.ensure_consumer(ConsumerSpec(f"{world.name}-none", "work", ("a",)))

    async def test_append_stores_and_subscribers_hear_it(self, bus: Bus, other: Bus, world: World) -> None:
        name = await stream(bus, world)
        got: list[Incoming] = []
        await other.subscribe(f"{world.name}.s.*", collect(got))
        subject = f"{world.name}.s.a"
        assert await bus.append(subject, b"one", headers={"K": "v"}, expect_last=0) == 1
        assert await bus.append(subject, [b"t", memoryview(b"wo")]) == 2
        await bus.publish(subject, b"three")
        await eventually(lambda: len(got) == 3)
        assert [m.data for m in got] == [b"one", b"two", b"three"]
        assert got[0].headers == {"K": "v"}
        assert await bus.read(name, subject) == [
            Stored(subject, 1, b"one", {"K": "v"}, 3),
            Stored(subject, 2, b"two", {}, 3),
            Stored(subject, 3, b"three", {}, 5),
        ]

    async def test_append_without_a_stream(self, bus: Bus, world: World) -> None:
        with pytest.raises(StreamMissing):
            await bus.append(f"{world.name}.nowhere", b"")
        await bus.subscribe(f"{world.name}.nowhere", collect([]))  # hears it, but does not store it
        with pytest.raises(StreamMissing):
            await bus.append(f"{world.name}.nowhere", b"", timeout=0.2)

    async def test_append_expects_the_last_sequence_of_its_subject(self, bus: Bus, world: World) -> None:
        await stream(bus, world)
        a, b = f"{world.name}.s.a", f"{world.name}.s.b"
        assert await bus.append(a, b"", expect_last=0) == 1
        assert await bus.append(b, b"", expect_last=0) == 2
        assert await bus.append(a, b"", expect_last=1) == 3
        for wrong in (0, 1, 2, 9):
            with pytest.raises(SequenceConflict):
                await bus.append(a, b"", expect_last=wrong)
        assert await bus.append(a, b"", expect_last=3) == 4

    async def test_a_message_id_is_taken_once(self, bus: Bus, other: Bus, world: World) -> None:
        name = await stream(bus, world)
        await bus.append(f"{world.name}.s.a", b"", message_id="m1")
        await bus.append(f"{world.name}.s.a", b"", message_id="m2")
        with pytest.raises(SequenceConflict):
            await other.append(f"{world.name}.s.a", b"", message_id="m1")
        assert (await bus.stream_state(name)).messages == 2

    @pytest.mark.parametrize("limit", [{"max_msgs": 3}, {"max_bytes": 400}])
    async def test_a_full_stream_that_discards_new_refuses(self, bus: Bus, world: World, limit: dict[str, int]) -> None:
        name = await stream(bus, world, discard="new", **limit)
        subject = f"{world.name}.s.a"

        async def fill() -> None:
            for _ in range(20):
                await bus.append(subject, b"x" * 50)

        with pytest.raises(StreamFull):
            await fill()
        state = await bus.stream_state(name)
        assert state.first_seq == 1
        assert state.messages >= 3
        await bus.publish(subject, b"x" * 50)  # refused in silence
        assert await bus.stream_state(name) == state

    async def test_a_full_stream_that_discards_old_evicts_in_order(self, bus: Bus, world: World) -> None:
        name = await stream(bus, world, max_bytes=1000)
        subjects = [f"{world.name}.s.{i:02}" for i in range(20)]
        for subject in subjects:
            await bus.append(subject, b"x" * 100, expect_last=0)
        state = await bus.stream_state(name)
        assert state.last_seq == 20
        assert state.first_seq == 20 - state.messages + 1
        assert state.bytes <= 1000 < state.bytes + state.bytes / state.messages
        assert set(await bus.get_many(name, subjects)) == set(subjects[state.first_seq - 1 :])
        assert await bus.append(subjects[0], b"again", expect_last=0) == 21  # evicted, so it may come again

    async def test_one_message_per_subject(self, bus: Bus, world: World) -> None:
        name = await stream(bus, world, max_msgs_per_subject=1)
        for data in (b"old", b"new"):
            await bus.append(f"{world.name}.s.a", data)
        assert [m.data for m in await bus.read(name, f"{world.name}.s.a")] == [b"new"]
        assert (await bus.stream_state(name)).first_seq == 2

    async def test_messages_are_counted_by_subject(self, bus: Bus, other: Bus, world: World) -> None:
        name = await stream(bus, world)
        assert await bus.subject_counts(name, ">") == {}
        for subject in ("a.x", "b.x", "a.y", "a.x", "a"):
            await bus.append(f"{world.name}.s.{subject}", b"")
        under = f"{world.name}.s"
        assert await other.subject_counts(name, f"{under}.a.*") == {f"{under}.a.x": 2, f"{under}.a.y": 1}
        assert await other.subject_counts(name, f"{under}.*.x") == {f"{under}.a.x": 2, f"{under}.b.x": 1}
        assert await other.subject_counts(name, f"{under}.a") == {f"{under}.a": 1}
        assert sum((await other.subject_counts(name, f"{under}.>")).values()) == 5
        assert await other.subject_counts(name, f"{under}.none") == {}
        with pytest.raises(StreamMissing, match=f"{world.name}-none"):
            await bus.subject_counts(f"{world.name}-none", ">")
        with pytest.raises(BusError, match="empty"):
            await bus.subject_counts(name, "")

    async def test_purge_removes_what_matches(self, bus: Bus, other: Bus, world: World) -> None:
        name = await stream(bus, world)
        for subject in ("a.x", "b.x", "a.y", "a.x"):
            await bus.append(f"{world.name}.s.{subject}", b"")
        assert await other.purge(name, f"{world.name}.s.a.*") == 3
        assert await bus.subject_counts(name, ">") == {f"{world.name}.s.b.x": 1}
        assert await bus.get_many(name, [f"{world.name}.s.a.x"]) == {}
        assert await other.purge(name, f"{world.name}.s.a.*") == 0
        assert await bus.append(f"{world.name}.s.a.x", b"again", expect_last=0) == 5
        with pytest.raises(StreamMissing, match=f"{world.name}-none"):
            await bus.purge(f"{world.name}-none", ">")
        with pytest.raises(BusError, match="empty"):
            await bus.purge(name, "")  # which NATS takes for everything
        assert (await bus.stream_state(name)).messages == 2

    async def test_messages_age_out(self, bus: Bus, world: World) -> None:
        name = await stream(bus, world, max_age=0.3)
        await bus.append(f"{world.name}.s.a", b"")

        async def gone() -> bool:
            return (await bus.stream_state(name)).messages == 0

        assert not await gone()
        await eventually(gone, within=3)

    async def test_a_message_over_the_streams_size_is_refused(self, bus: Bus, world: World) -> None:
        name = await stream(bus, world, max_msg_size=100)
        await bus.append(f"{world.name}.s.a", b"x" * 100)
        with pytest.raises(TooLarge):
            await bus.append(f"{world.name}.s.a", b"x" * 101)
        assert (await bus.stream_state(name)).messages == 1

    async def test_stream_state(self, bus: Bus, world: World) -> None:
        name = await stream(bus, world, max_msgs=2)
        assert await bus.stream_state(name) == StreamState(0, 0, 0, 0)
        for _ in range(3):
            await bus.append(f"{world.name}.s.a", b"12345", headers={"Key": "value"})
        state = await bus.stream_state(name)
        assert (state.first_seq, state.last_seq, state.messages) == (2, 3, 2)
        weight = len(f"{world.name}.s.a") + len("NATS/1.0\r\nKey: value\r\n\r\n") + 5 + 16
        assert state.bytes == 2 * weight
        with pytest.raises(StreamMissing):
            await bus.stream_state(f"{world.name}-none")

    async def test_what_waits_in_a_queue_was_not_delivered_yet(self, bus: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world)
        for _ in range(3):
            await bus.append(subject, b"")
        assert await bus.waiting(name, consumer) == 3
        [job] = await bus.pull(name, consumer, 1, 1)
        assert await bus.waiting(name, consumer) == 2
        await job.ack()
        assert await bus.waiting(name, consumer) == 2
        with pytest.raises(StreamMissing):
            await bus.waiting(name, "nobody")

    async def test_an_emptied_queue_keeps_its_sequence(self, bus: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world)
        await bus.append(subject, b"")
        [job] = await bus.pull(name, consumer, 1, 1)
        await job.ack()

        async def empty() -> bool:
            return await bus.stream_state(name) == StreamState(2, 1, 0, 0)

        await eventually(empty)

    async def test_stream_of(self, bus: Bus, world: World) -> None:
        name = await stream(bus, world)
        assert await bus.stream_of(f"{world.name}.s.a.b") == name
        assert await bus.stream_of(f"{world.name}.s") is None


class TestReading:
    async def test_get_many_returns_the_last_of_each(self, bus: Bus, world: World) -> None:
        name = await stream(bus, world)
        a, b, missing = (f"{world.name}.s.{x}" for x in ("a", "b", "missing"))
        await bus.append(a, b"old")
        await bus.append(b, b"b", headers={"K": "v"})
        await bus.append(a, b"new", expect_last=1)
        found = await bus.get_many(name, [b, missing, a, a])
        assert found == {a: Stored(a, 3, b"new", {}, 3), b: Stored(b, 2, b"b", {"K": "v"}, 1)}
        assert await bus.get_many(name, [missing]) == {}
        assert await bus.get_many(name, []) == {}
        with pytest.raises(StreamMissing):
            await bus.get_many(f"{world.name}-none", [a])

    async def test_get_many_of_more_than_a_page(self, bus: Bus, world: World) -> None:
        name = await stream(bus, world)
        subjects = [f"{world.name}.s.{i}" for i in range(2300)]
        for part in range(0, 2300, 100):
            await asyncio.gather(*(bus.append(s, s.encode()) for s in subjects[part : part + 100]))
        absent = [f"{world.name}.s.no{i}" for i in range(1500)]
        found = await bus.get_many(name, [s for pair in zip(subjects, absent, strict=False) for s in pair] + subjects)
        assert set(found) == set(subjects)
        assert all(m.data == s.encode() for s, m in found.items())

    async def test_concurrent_get_many(self, bus: Bus, world: World) -> None:
        name = await stream(bus, world)
        subjects = [f"{world.name}.s.{i}" for i in range(50)]
        for subject in subjects:
            await bus.append(subject, b"x" * 1000)
        for found in await asyncio.gather(*(bus.get_many(name, subjects[i:]) for i in range(20))):
            assert len(found) in range(31, 51)

    async def test_read_is_complete_and_in_order(self, bus: Bus, world: World) -> None:
        name = await stream(bus, world)
        a, b = f"{world.name}.s.a", f"{world.name}.s.b"
        for i in range(0, 2200, 100):
            await asyncio.gather(*(bus.append(b if i % 1000 == 0 else a, b"%d" % (i + j)) for j in range(100)))
        messages = await bus.read(name, a)
        assert [int(m.data) for m in messages] == [i for i in range(2200) if i // 100 % 10]
        assert [m.seq for m in messages] == sorted(m.seq for m in messages)
        assert await bus.read(name, a, after=messages[-3].seq) == messages[-2:]
        assert await bus.read(name, a, after=messages[-1].seq) == []
        assert await bus.read(name, a, after=messages[2].seq, limit=5) == messages[3:8]
        assert await bus.read(name, a, limit=1500) == messages[:1500]
        assert await bus.read(name, a, after=messages[-3].seq, limit=2) == messages[-2:]
        assert await bus.read(name, a, after=messages[-3].seq, limit=3) == messages[-2:]
        assert await bus.read(name, f"{world.name}.s.none") == []
        with pytest.raises(StreamMissing):
            await bus.read(f"{world.name}-none", a)

    async def test_follow_gives_what_is_there_and_what_comes(self, bus: Bus, other: Bus, world: World) -> None:
        name = await stream(bus, world)
        for i in range(1200):
            await bus.publish(f"{world.name}.s.{i}", b"x" * i)
        await bus.append(f"{world.name}.s.last", b"", headers={"K": "v"})
        seen: list[Stored] = []
        sub = await other.follow(name, f"{world.name}.s.*", seen.append)
        await eventually(lambda: len(seen) == 1201)
        assert seen[7] == Stored(f"{world.name}.s.7", 8, b"", {}, 7)
        assert seen[-1] == Stored(f"{world.name}.s.last", 1201, b"", {"K": "v"}, 0)
        await bus.append(f"{world.name}.s.x.ignored", b"")
        await bus.append(f"{world.name}.s.new", b"abc")
        await eventually(lambda: len(seen) == 1202, within=1)
        assert [m.seq for m in seen] == [*range(1, 1202), 1203]
        await sub.unsubscribe()
        await bus.append(f"{world.name}.s.after", b"")
        await anyio.sleep(0.05)
        assert len(seen) == 1202

    async def test_a_raising_index_handler_is_counted_and_goes_on(self, bus: Bus, world: World) -> None:
        name = await stream(bus, world)
        seen: list[int] = []

        def handler(message: Stored) -> None:
            if message.seq == 1:
                raise ValueError("broken")
            seen.append(message.seq)

        for _ in range(3):
            await bus.append(f"{world.name}.s.a", b"")
        await bus.follow(name, f"{world.name}.s.*", handler)
        await eventually(lambda: seen == [2, 3])
        assert bus.counters["handler_errors"] == 1

    async def test_follow_needs_its_stream(self, bus: Bus, world: World) -> None:
        with pytest.raises(StreamMissing):
            await bus.follow(f"{world.name}-none", "a", lambda _: None)


class TestQueues:
    async def test_pull_takes_what_is_there(self, bus: Bus, other: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world)
        for i in range(5):
            await bus.append(subject, b"%d" % i, headers={"K": "v"})
        start = time.monotonic()
        jobs = await other.pull(name, consumer, 3, 5)
        assert time.monotonic() - start < 1
        assert [(j.subject, j.data, j.seq, j.delivered, dict(j.headers)) for j in jobs] == [
            (subject, b"%d" % i, i + 1, 1, {"K": "v"}) for i in range(3)
        ]
        assert all(0 <= j.age < 5 for j in jobs)
        assert [j.data for j in await other.pull(name, consumer, 10, 5)] == [b"3", b"4"]

    async def test_pull_waits_for_the_first_job(self, bus: Bus, other: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world)
        async with anyio.create_task_group() as group:

            async def later() -> None:
                await anyio.sleep(0.2)
                await other.append(subject, b"late")

            group.start_soon(later)
            start = time.monotonic()
            [job] = await bus.pull(name, consumer, 4, 5)
            assert 0.15 < time.monotonic() - start < 1
        assert job.data == b"late"

    @pytest.mark.parametrize("wait", [0, 0.2])
    async def test_pull_of_an_empty_queue(self, bus: Bus, world: World, wait: float) -> None:
        name, consumer, _ = await queue(bus, world)
        start = time.monotonic()
        assert await bus.pull(name, consumer, 4, wait) == []
        assert wait - 0.01 <= time.monotonic() - start < wait + 0.5

    async def test_pull_needs_its_consumer(self, bus: Bus, world: World) -> None:
        name, consumer, _ = await queue(bus, world)
        for missing in ((name, "none"), (f"{world.name}-none", consumer)):
            with pytest.raises(StreamMissing):
                await bus.pull(*missing, 1, 1)

    async def test_concurrent_pulls_share_the_jobs(self, bus: Bus, other: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world)
        pulls = [asyncio.create_task(b.pull(name, consumer, 1, 5)) for b in (bus, bus, bus, other, other)]
        await anyio.sleep(0.05)
        for i in range(5):
            await bus.append(subject, b"%d" % i)
        jobs = [job for jobs in await asyncio.gather(*pulls) for job in jobs]
        assert sorted(job.data for job in jobs) == [b"0", b"1", b"2", b"3", b"4"]
        assert {job.delivered for job in jobs} == {1}

    async def test_an_acked_job_is_gone(self, bus: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world, ack_wait=0.2)
        await bus.append(subject, b"")
        [job] = await bus.pull(name, consumer, 1, 1)
        await job.ack()
        assert await bus.pull(name, consumer, 1, 0.35) == []
        assert (await bus.stream_state(name)).messages == 0

    async def test_a_silent_worker_loses_its_job(self, bus: Bus, other: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world, ack_wait=0.2)
        await bus.append(subject, b"work")
        [first] = await bus.pull(name, consumer, 1, 1)
        [second] = await other.pull(name, consumer, 1, 3)
        assert (second.data, second.seq, second.delivered) == (b"work", first.seq, 2)
        assert second.age >= 0.15
        await first.ack()  # late, but the work is done: nobody shall do it again
        assert await other.pull(name, consumer, 1, 0.4) == []

    async def test_a_held_job_stays(self, bus: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world, ack_wait=0.4)
        await bus.append(subject, b"")
        [job] = await bus.pull(name, consumer, 1, 1)
        for _ in range(4):
            assert await bus.pull(name, consumer, 1, 0.2) == []
            await job.hold()
        [again] = await bus.pull(name, consumer, 1, 3)
        assert again.delivered == 2

    async def test_nak_gives_it_back_at_once_or_later(self, bus: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world)
        await bus.append(subject, b"")
        [job] = await bus.pull(name, consumer, 1, 1)
        await job.nak()
        [job] = await bus.pull(name, consumer, 1, 1)
        assert job.delivered == 2
        await job.nak(delay=0.4)
        assert await bus.pull(name, consumer, 1, 0.2) == []
        [job] = await bus.pull(name, consumer, 1, 2)
        assert job.delivered == 3

    async def test_a_terminated_job_is_gone(self, bus: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world, ack_wait=0.2)
        await bus.append(subject, b"")
        [job] = await bus.pull(name, consumer, 1, 1)
        await job.term()
        assert await bus.pull(name, consumer, 1, 0.35) == []
        assert (await bus.stream_state(name)).messages == 0

    async def test_after_max_deliver_a_job_stays_undelivered(self, bus: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world, max_deliver=2, ack_wait=0.2)
        await bus.append(subject, b"")
        for delivered in (1, 2):
            [job] = await bus.pull(name, consumer, 1, 2)
            assert job.delivered == delivered
        assert await bus.pull(name, consumer, 1, 0.4) == []
        assert (await bus.stream_state(name)).messages == 1

    @pytest.mark.parametrize("wait", [0, 0.3])
    async def test_max_ack_pending_bounds_what_is_out(self, bus: Bus, world: World, wait: float) -> None:
        name, consumer, subject = await queue(bus, world, max_ack_pending=3)
        for i in range(6):
            await bus.append(subject, b"%d" % i)
        jobs = await bus.pull(name, consumer, 5, wait)
        assert [j.data for j in jobs] == [b"0", b"1", b"2"]
        assert await bus.pull(name, consumer, 5, wait) == []
        await jobs[0].ack()
        [job] = await bus.pull(name, consumer, 5, 1)
        assert (job.data, job.delivered) == (b"3", 1)

    async def test_consumers_divide_a_queue_by_subject(self, bus: Bus, world: World) -> None:
        name, _, _ = await queue(bus, world)
        with pytest.raises(ConfigError):
            await bus.ensure_consumer(ConsumerSpec(name, "overlapping", (f"{world.name}.q.a",)))
        await bus.ensure_consumer(ConsumerSpec(name, "deeper", (f"{world.name}.q.*.x",)))
        await bus.append(f"{world.name}.q.a.x", b"deep")
        await bus.append(f"{world.name}.q.a", b"flat")
        assert [j.data for j in await bus.pull(name, "deeper", 5, 1)] == [b"deep"]
        assert [j.data for j in await bus.pull(name, "work", 5, 1)] == [b"flat"]

    async def test_one_consumer_takes_several_subjects(self, bus: Bus, world: World) -> None:
        name, _, _ = await queue(bus, world)
        with pytest.raises(ConfigError):
            await bus.ensure_consumer(ConsumerSpec(name, "bad", (f"{world.name}.q.x.*", f"{world.name}.q.a")))
        await bus.ensure_consumer(ConsumerSpec(name, "two", (f"{world.name}.q.x.*", f"{world.name}.q.y.*")))
        for subject in ("x.1", "z.1", "y.1", "a", "x.2"):
            await bus.append(f"{world.name}.q.{subject}", subject.encode())
        assert [j.data for j in await bus.pull(name, "two", 5, 1)] == [b"x.1", b"y.1", b"x.2"]
        assert [j.data for j in await bus.pull(name, "work", 5, 1)] == [b"a"]

    async def test_a_purged_job_is_gone(self, bus: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world, ack_wait=30, max_ack_pending=2)
        for i in range(3):
            await bus.append(subject, b"%d" % i)
        assert len(await bus.pull(name, consumer, 3, 0)) == 2
        assert await bus.purge(name, f"{world.name}.q.*") == 3
        assert await bus.pull(name, consumer, 3, 0.1) == []
        await bus.append(subject, b"new")  # what was purged counts no more towards what is out
        assert [j.data for j in await bus.pull(name, consumer, 3, 1)] == [b"new"]

    async def test_an_adopted_job_is_the_same_job(self, bus: Bus, other: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world, ack_wait=0.4)
        await bus.append(subject, b"work", headers={"K": "v"})
        [job] = await bus.pull(name, consumer, 1, 1)
        await job.nak()
        [job] = await bus.pull(name, consumer, 1, 1)
        adopted = other.adopt(name, job.handle, job.subject, job.data, job.headers)
        for field in ("handle", "subject", "data", "headers", "seq", "delivered", "stamp"):
            assert getattr(adopted, field) == getattr(job, field)
        assert adopted.delivered == 2
        assert job.age <= adopted.age < job.age + 1
        for _ in range(4):
            assert await bus.pull(name, consumer, 1, 0.2) == []
            await adopted.hold()
        await adopted.nak()
        [again] = await bus.pull(name, consumer, 1, 1)
        assert again.delivered == 3
        await other.adopt(name, again.handle, again.subject, again.data, again.headers).ack()
        assert await bus.pull(name, consumer, 1, 0.6) == []
        assert (await bus.stream_state(name)).messages == 0

    async def test_an_adopted_job_can_be_ended(self, bus: Bus, other: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world, ack_wait=0.2)
        await bus.append(subject, b"work")
        [job] = await bus.pull(name, consumer, 1, 1)
        await bus.close()  # the worker that pulled it is gone
        await other.adopt(name, job.handle, job.subject, job.data, job.headers).term()
        assert await other.pull(name, consumer, 1, 0.35) == []
        assert (await other.stream_state(name)).messages == 0

    async def test_only_handles_of_the_stream_are_adopted(self, bus: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world)
        await bus.append(subject, b"work")
        [job] = await bus.pull(name, consumer, 1, 1)
        tokens = job.handle.split(".")
        assert tokens[2:5] == [name, consumer, "1"]
        bad = [
            "",
            subject,
            job.handle + ".x",
            job.handle + "\n",
            " " + job.handle,
            job.handle.replace(consumer, "*"),
            job.handle.replace(consumer, "wo rk"),
            ".".join([*tokens[:-1], ">"]),
            ".".join([*tokens[:5], "-1", *tokens[6:]]),
            ".".join([*tokens[:5], "1_0", *tokens[6:]]),
            ".".join([*tokens[:5], "0", *tokens[6:]]),
            ".".join(["$JS", "API", *tokens[2:]]),
            ".".join(["$JS.ACK", f"{name}2", *tokens[3:]]),
            ".".join(["$JS.ACK", name, *tokens[2:]]),
        ]
        for handle in bad:
            with pytest.raises(InvalidField) as caught:
                bus.adopt(name, handle, subject, b"", {})
            assert caught.value.field == "handle"
        with pytest.raises(InvalidField):
            bus.adopt(f"{name}2", job.handle, subject, b"", {})

    async def test_a_cancelled_pull_loses_no_job(self, bus: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world)
        for i in range(10):
            with anyio.move_on_after(0.01 * i):
                await bus.pull(name, consumer, 1, 30)
        await bus.append(subject, b"work")
        [job] = await bus.pull(name, consumer, 1, 2)
        assert job.data == b"work"

    async def test_a_job_that_races_with_a_cancel_comes_again_soon(self, bus: Bus, other: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world, ack_wait=30)
        for i in range(30):
            pull = asyncio.create_task(bus.pull(name, consumer, 1, 30))
            await anyio.sleep(0.005)
            append = asyncio.create_task(other.append(subject, b"%d" % i))
            for _ in range(i % 10):
                await asyncio.sleep(0)
            pull.cancel()
            jobs = (await asyncio.gather(pull, return_exceptions=True))[0]
            await append
            if isinstance(jobs, BaseException):
                jobs = await other.pull(name, consumer, 1, 2)
            [job] = jobs
            assert job.data == b"%d" % i
            await job.ack()


class TestFaults:
    async def test_while_disconnected_everything_is_refused_at_once(self, bus: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world)
        got: list[Incoming] = []
        await bus.subscribe(subject, collect(got))
        await world.outage()
        assert not bus.connected
        await refuses_everything(bus, name, consumer, subject)
        await world.recovery()
        await bus.publish(subject, b"after")
        await eventually(lambda: len(got) == 1)
        await anyio.sleep(0.05)
        assert [m.data for m in got] == [b"after"]  # nothing was kept and sent later

    async def test_what_waits_ends_when_the_connection_goes(self, bus: Bus, world: World) -> None:
        name, consumer, _ = await queue(bus, world)
        await bus.subscribe(f"{world.name}.silent", collect([]))
        waiting = [
            asyncio.create_task(bus.request(f"{world.name}.silent", b"", 30)),
            asyncio.create_task(bus.pull(name, consumer, 1, 30)),
        ]
        await anyio.sleep(0.1)
        await world.outage()
        start = time.monotonic()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, BusDisconnected)
        assert time.monotonic() - start < 1
        await world.recovery()

    async def test_after_a_restart_work_goes_on(self, bus: Bus, other: Bus, world: World) -> None:
        name, consumer, subject = await queue(bus, world, ack_wait=1)
        await other.append(subject, b"taken")
        await other.append(subject, b"waiting")
        [taken] = await bus.pull(name, consumer, 1, 1)
        got: list[Incoming] = []
        await bus.subscribe(f"{world.name}.core", collect(got))
        back: list[int] = []

        async def reconnected() -> None:
            back.append((await bus.stream_state(name)).messages)  # the callback may use the bus

        async def broken() -> None:
            raise ValueError("broken")

        bus.on_reconnect(broken)
        bus.on_reconnect(reconnected)
        await anyio.sleep(0.15)  # the server writes down what it delivered a moment later
        await world.outage()
        await world.recovery()
        await eventually(lambda: back == [2])
        assert bus.counters["reconnects"] == 1
        assert bus.counters["handler_errors"] == 1
        await other.publish(f"{world.name}.core", b"hello")
        await eventually(lambda: len(got) == 1)
        jobs = await bus.pull(name, consumer, 1, 2) + await bus.pull(name, consumer, 1, 3)
        assert {(j.data, j.delivered) for j in jobs} == {(b"waiting", 1), (b"taken", 2)}
        assert taken.seq in {j.seq for j in jobs}

    async def test_memory_streams_are_gone_after_a_restart_until_made_again(self, bus: Bus, world: World) -> None:
        name = await stream(bus, world)
        subject = f"{world.name}.s.a"
        for _ in range(3):
            await bus.append(subject, b"old")
        seen: list[Stored] = []
        await bus.follow(name, f"{world.name}.s.*", seen.append)
        await eventually(lambda: len(seen) == 3)
        await world.outage()
        await world.recovery()
        for attempt in (
            bus.append(subject, b""),
            bus.get_many(name, [subject]),
            bus.read(name, subject),
            bus.stream_state(name),
        ):
            with pytest.raises(StreamMissing):
                await attempt
        assert await stream(bus, world) == name
        assert await bus.get_many(name, [subject]) == {}
        assert await bus.append(subject, b"new", expect_last=0) == 1
        await eventually(lambda: len(seen) == 4)
        assert (seen[-1].seq, seen[-1].size) == (1, 3)

    async def test_a_follower_goes_on_after_an_outage(self, bus: Bus, other: Bus, world: World) -> None:
        await bus.ensure_stream(StreamSpec(f"{world.name}-F", (f"{world.name}.f.*",), storage="file"))
        seen: list[int] = []
        await bus.append(f"{world.name}.f.a", b"")
        await bus.follow(f"{world.name}-F", f"{world.name}.f.*", lambda m: seen.append(m.seq))
        await eventually(lambda: seen == [1])
        await world.outage()
        await world.recovery()
        await other.append(f"{world.name}.f.a", b"")
        await eventually(lambda: seen == [1, 2])
