"""Streams on a real nats-server at its limits, and with answers lost on the way."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from nats.aio.msg import Msg

from shared.bus import nats_api
from shared.bus.base import ConsumerSpec, Incoming, Stored, StreamSpec
from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.bus.nats_api import Api
from shared.bus.nats_inbox import Inbox
from shared.errors import ConfigError, StreamFull, StreamMissing, TooLarge
from tests.contract.conftest import eventually

pytestmark = pytest.mark.anyio

MiB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats(max_memory_store=512 * MiB, max_pending=64 * MiB) as running:
        yield running


@pytest.fixture
async def bus(server: EmbeddedNats) -> AsyncIterator[NatsBus]:
    connected = await NatsBus.connect(server.url, name="test", wait=5)
    yield connected
    await connected.close()


@pytest.fixture(scope="module")
async def blocks(server: EmbeddedNats) -> list[str]:
    """100 MB in 50 messages on a stream BLOCKS; returns their subjects."""
    bus = await NatsBus.connect(server.url, name="writer", wait=5)
    await bus.ensure_stream(StreamSpec("BLOCKS", ("blocks.*",), max_msgs_per_subject=1, max_bytes=256 * MiB))
    subjects = [f"blocks.{i}" for i in range(50)]
    window = asyncio.Semaphore(8)

    async def put(subject: str) -> None:
        async with window:
            await bus.append(subject, subject.encode() * 200_000, expect_last=0, timeout=20)

    await asyncio.gather(*(put(subject) for subject in subjects))
    await bus.close()
    return subjects


async def test_get_many_of_more_than_max_pending_is_complete(bus: NatsBus, blocks: list[str]) -> None:
    assert sum(len(s) * 200_000 for s in blocks) > 64 * MiB
    found = await bus.get_many("BLOCKS", [*reversed(blocks), "blocks.none"], timeout=30)
    assert sorted(found) == sorted(blocks)
    assert all(found[s].data == s.encode() * 200_000 for s in blocks)
    assert bus.counters["reconnects"] == 0


async def test_concurrent_get_many_stay_below_max_pending(bus: NatsBus, blocks: list[str]) -> None:
    parts = [blocks[0:20], blocks[15:35], blocks[30:50]]
    results = await asyncio.gather(*(bus.get_many("BLOCKS", part, timeout=30) for part in parts))
    for part, found in zip(parts, results, strict=True):
        assert sorted(found) == sorted(part)


@pytest.mark.parametrize("lose", [1, 3, 5])
async def test_lost_answers_are_asked_for_again(bus: NatsBus, monkeypatch: pytest.MonkeyPatch, lose: int) -> None:
    await bus.ensure_stream(StreamSpec(f"LOSSY{lose}", (f"lossy{lose}.>",)))
    subjects = [f"lossy{lose}.{i}" for i in range(40)]
    for subject in subjects:
        await bus.append(subject, b"x")
        await bus.append(f"lossy{lose}.same", subject.encode())
    deliver, count = Inbox.deliver, 0

    async def lossy(self: Inbox, message: Msg) -> None:
        nonlocal count
        count += "Nats-Sequence" in (message.headers or {})
        if count % 7 == lose and "Nats-Sequence" in (message.headers or {}):
            return
        await deliver(self, message)

    inbox = bus._connection._inbox
    monkeypatch.setattr(Inbox, "deliver", lossy)
    await bus._connection.drop(inbox)
    await bus._connection._attach(inbox)
    assert set(await bus.get_many(f"LOSSY{lose}", subjects)) == set(subjects)
    assert [m.data.decode() for m in await bus.read(f"LOSSY{lose}", f"lossy{lose}.same")] == subjects
    assert count > 80  # some were sent twice


async def test_losing_the_race_to_create_is_no_error_unless_the_winner_differs(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = StreamSpec("RACED", ("raced.*",), "workqueue", "file", "new")
    consumer = ConsumerSpec("RACED", "work", ("raced.*",))
    config = nats_api._stream_config(spec) | {"description": "by another hand"}
    await bus._api.ask("STREAM.CREATE.RACED", config)
    config = nats_api._consumer_config(consumer) | {"description": "by another hand"}
    await bus._api.ask("CONSUMER.CREATE.RACED.work", {"stream_name": "RACED", "config": config})

    def hide_once(name: str) -> None:
        real = getattr(Api, name)
        asked: list[object] = []

        async def first_finds_nothing(*args: object) -> object:
            asked.append(args)
            if len(asked) == 1:
                raise StreamMissing("not yet")
            return await real(*args)

        monkeypatch.setattr(Api, name, first_finds_nothing)

    for ensure in (bus.ensure_stream(spec), bus.ensure_consumer(consumer)):
        hide_once("stream")
        hide_once("consumer")
        await ensure
        monkeypatch.undo()
    for ensure in (
        bus.ensure_stream(replace(spec, max_msgs=7)),
        bus.ensure_consumer(replace(consumer, max_deliver=7)),
    ):
        hide_once("stream")
        hide_once("consumer")
        with pytest.raises(ConfigError, match="expected 7"):
            await ensure
        monkeypatch.undo()


@pytest.mark.parametrize("storage", ["memory", "file"])
async def test_a_stream_too_large_for_the_server(bus: NatsBus, storage: str) -> None:
    with pytest.raises(ConfigError, match="too little room") as caught:
        await bus.ensure_stream(StreamSpec("HUGE", ("huge.*",), max_bytes=1 << 40, storage=storage))  # type: ignore[arg-type]
    for part in ("HUGE", str(1 << 40), storage):
        assert part in caught.value.message


async def test_direct_get_must_be_allowed(bus: NatsBus) -> None:
    await bus.ensure_stream(StreamSpec("INDIRECT", ("indirect.*",), allow_direct=False))
    with pytest.raises(ConfigError, match="allow_direct"):
        await bus.get_many("INDIRECT", ["indirect.a"])


async def test_a_payload_of_20_megabytes_is_refused_before_it_is_sent(bus: NatsBus) -> None:
    for attempt in (bus.publish("a", bytes(20 * MiB)), bus.append("blocks.a", [bytes(20 * MiB)])):
        with pytest.raises(TooLarge):
            await attempt
    assert (bus.connected, bus.counters["reconnects"], bus.counters["errors"]) == (True, 0, 0)


async def test_append_backs_off_while_the_stream_cannot_keep_up(bus: NatsBus) -> None:
    busy = {"error": {"code": 429, "err_code": 10167, "description": "too many requests"}}
    asked = 0

    async def stream(message: Incoming) -> None:
        nonlocal asked
        asked += 1
        answer = busy if asked < 4 or message.subject == "busy.always" else {"stream": "S", "seq": 7}
        await bus.publish(message.reply, json.dumps(answer).encode())

    await bus.subscribe("busy.*", stream)
    assert await bus.append("busy.a", b"") == 7
    assert asked == 4
    start = time.monotonic()
    with pytest.raises(StreamFull):
        await bus.append("busy.always", b"", timeout=0.5)
    assert time.monotonic() - start < 1.5
    assert asked < 20


async def test_followers_leave_no_consumer_behind(bus: NatsBus) -> None:
    await bus.ensure_stream(StreamSpec("FOLLOWED", ("followed.*",)))
    for _ in range(5):
        await (await bus.follow("FOLLOWED", "followed.*", lambda _: None)).unsubscribe()

    async def none() -> bool:
        answer = await bus._connection.request("$JS.API.STREAM.INFO.FOLLOWED", b"", 2)
        return bool(json.loads(answer.data)["state"]["consumer_count"] == 0)

    await eventually(none)


async def test_a_follower_makes_a_lost_consumer_and_a_lost_message_good(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver, seen = Inbox.deliver, 0

    async def lossy(self: Inbox, message: Msg) -> None:
        nonlocal seen
        seen += message.subject.startswith("gaps.")
        if message.subject.startswith("gaps.") and seen == 5:
            return
        await deliver(self, message)

    monkeypatch.setattr(Inbox, "deliver", lossy)
    await bus.ensure_stream(StreamSpec("GAPS", ("gaps.*",)))
    for _ in range(10):
        await bus.append("gaps.a", b"")
    seqs: list[int] = []
    follower = await bus.follow("GAPS", "gaps.*", lambda m: seqs.append(m.seq))
    await eventually(lambda: seqs == list(range(1, 11)))
    consumer = follower._consumer  # type: ignore[attr-defined]
    await bus._connection.request(f"$JS.API.CONSUMER.DELETE.GAPS.{consumer}", b"", 2)
    await bus.append("gaps.a", b"")
    await eventually(lambda: seqs == list(range(1, 12)))


async def test_a_follower_starts_over_on_a_stream_made_anew(bus: NatsBus) -> None:
    spec = StreamSpec("ANEW", ("anew.*",))
    await bus.ensure_stream(spec)
    for _ in range(3):
        await bus.append("anew.a", b"")
    seqs: list[int] = []
    await bus.follow("ANEW", "anew.*", lambda m: seqs.append(m.seq))
    await eventually(lambda: seqs == [1, 2, 3])
    await bus._connection.request("$JS.API.STREAM.DELETE.ANEW", b"", 2)
    await asyncio.sleep(0.1)
    await bus.ensure_stream(spec)
    await bus.append("anew.a", b"")
    await eventually(lambda: seqs == [1, 2, 3, 1])


async def test_a_follower_reads_ten_thousand_names_quickly(bus: NatsBus) -> None:
    await bus.ensure_stream(StreamSpec("MANY", ("many.*",)))
    for i in range(10_000):
        await bus.publish(f"many.{i}", b"")
    await bus.append("many.last", b"")
    seen: list[Stored] = []
    start = time.monotonic()
    await bus.follow("MANY", "many.*", seen.append)
    await eventually(lambda: bool(seen) and seen[-1].subject == "many.last")
    print(f"{len(seen)} names in {time.monotonic() - start:.2f} s")
    assert len(seen) >= 10_000


def feed(server: EmbeddedNats, prefix: str, count: int) -> None:
    """An empty message on each of `count` subjects, at the speed of a bare socket."""
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        answers = connection.makefile("rb")
        answers.readline()
        connection.sendall(b'CONNECT {"verbose":false}\r\n')
        for first in range(0, count, 500):  # each lot is handled before the next, or the stream's queue would overrun
            lot = range(first, min(first + 500, count))
            connection.sendall(b"".join(f"PUB {prefix}.{i} 0\r\n\r\n".encode() for i in lot) + b"PING\r\n")
            while not answers.readline().startswith(b"PONG"):
                pass


async def test_more_subjects_than_the_server_tells_at_once_are_counted(server: EmbeddedNats, bus: NatsBus) -> None:
    await bus.ensure_stream(StreamSpec("COUNTED", ("counted.>",)))
    await asyncio.to_thread(feed, server, "counted.a", 100_500)  # it tells 100,000
    await asyncio.to_thread(feed, server, "counted.b", 3)
    await bus.append("counted.b.0", b"")
    messages = (await bus.stream_state("COUNTED")).messages
    counts = await bus.subject_counts("COUNTED", "counted.a.*")
    assert len(counts) == messages - 4 > 100_000
    assert set(counts.values()) == {1}
    assert await bus.subject_counts("COUNTED", "counted.b.*") == {"counted.b.0": 2, "counted.b.1": 1, "counted.b.2": 1}
    assert await bus.purge("COUNTED", "counted.a.*") == messages - 4
    assert sum((await bus.subject_counts("COUNTED", ">")).values()) == 4


async def test_a_consumer_made_with_a_single_filter_field_is_the_same_consumer(bus: NatsBus) -> None:
    await bus.ensure_stream(StreamSpec("SINGLE", ("single.>",), "workqueue", "file", "new"))
    spec = ConsumerSpec("SINGLE", "work", ("single.a",))
    config = nats_api._consumer_config(spec)
    config["filter_subject"] = config.pop("filter_subjects")[0]
    await bus._api.ask("CONSUMER.CREATE.SINGLE.work", {"stream_name": "SINGLE", "config": config})
    assert "filter_subject" in await bus._api.consumer("SINGLE", "work")
    await bus.ensure_consumer(spec)
    with pytest.raises(ConfigError, match="filter_subjects is"):
        await bus.ensure_consumer(replace(spec, filter_subjects=("single.b",)))


async def test_pulls_leave_no_inbox_behind(bus: NatsBus) -> None:
    await bus.ensure_stream(StreamSpec("PULLED", ("pulled.*",), "workqueue", "file", "new"))
    await bus.ensure_consumer(ConsumerSpec("PULLED", "work", ("pulled.*",)))
    for i in range(20):
        pull = asyncio.create_task(bus.pull("PULLED", "work", 1, 30))
        await asyncio.sleep(0.002 * (i % 3))
        pull.cancel()
    await bus.append("pulled.a", b"")
    await asyncio.gather(*(bus.pull("PULLED", "work", 1, 1) for _ in range(3)))
    await eventually(lambda: len(bus._connection._receivers) <= 4)  # one for requests, one for each pull at a time


async def test_two_at_once_where_there_is_room_for_one(server: EmbeddedNats, bus: NatsBus) -> None:
    """Who is later finds the stream that the other has made."""
    other = await NatsBus.connect(server.url, name="other", wait=5)
    spec = StreamSpec("TIGHT", ("tight.*",), max_bytes=200 * MiB)
    for _ in range(5):
        await asyncio.gather(bus.ensure_stream(spec), other.ensure_stream(spec))
        await Api(bus._connection).ask("STREAM.DELETE.TIGHT")
    await other.close()
