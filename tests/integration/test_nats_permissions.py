"""Users of a real nats-server who may not do everything, and whether the server asks who somebody is."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio
import pytest
from structlog.testing import capture_logs

from shared.bus.base import Bus, ConsumerSpec, Incoming, StreamSpec
from shared.bus.block_link import Item, Reader
from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.errors import BusDisconnected, BusError, PermissionDenied, SequenceConflict
from tests.contract.conftest import eventually

pytestmark = pytest.mark.anyio

WORKER = "{ user: worker, password: sesame1 }"
LIMITED = """{ user: limited, password: sesame2, permissions: {
    publish: { allow: ["ok.>", "nowhere"] }, subscribe: { allow: ["_INBOX.>", "ok.>"] } } }"""
DEAF = '{ user: deaf, password: sesame3, permissions: { subscribe: { deny: ">" } } }'


def users(*all_of_them: str) -> str:
    return f"authorization {{ users = [ {', '.join(all_of_them)} ] }}"


def url(server: EmbeddedNats, login: str) -> str:
    return server.url.replace("nats://", f"nats://{login}@" if login else "nats://")


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats(config=users(WORKER, LIMITED, DEAF)) as running:
        yield running


@pytest.fixture
async def worker(server: EmbeddedNats) -> AsyncIterator[NatsBus]:
    """May do everything. Its streams are OK on `ok.>` and NO on `no.>`, which is a queue."""
    bus = await NatsBus.connect(url(server, "worker:sesame1"), name="worker", wait=5)
    await bus.ensure_stream(StreamSpec("OK", ("ok.>",)))
    await bus.ensure_stream(StreamSpec("NO", ("no.>",), "workqueue", "file", "new"))
    await bus.ensure_consumer(ConsumerSpec("NO", "work", ("no.*",)))
    yield bus
    await bus.close()


@pytest.fixture
async def limited(server: EmbeddedNats, worker: Bus) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(url(server, "limited:sesame2"), name="limited", wait=5)
    yield bus
    await bus.close()


@contextmanager
def denied(what: str) -> Iterator[None]:
    """At once, and naming what."""
    start = time.monotonic()
    with pytest.raises(PermissionDenied) as caught:
        yield
    assert what in caught.value.message
    assert time.monotonic() - start < 1


async def ignore(_: Incoming) -> None:
    pass


@pytest.mark.parametrize(
    ("asks", "what"),
    [
        (lambda bus: bus.append("no.Job", b"", timeout=30), "publish to no.Job"),
        (lambda bus: bus.append("no.Job", [b"x"], expect_last=0, timeout=30), "publish to no.Job"),
        (lambda bus: bus.request("no.Job", b"", 30), "publish to no.Job"),
        (lambda bus: bus.pull("NO", "work", 1, 30), "CONSUMER.MSG.NEXT.NO.work"),
        (lambda bus: bus.get_many("NO", ["no.a"], 30), "DIRECT.GET.NO"),
        (lambda bus: bus.read("NO", "no.a", timeout=30), "DIRECT.GET.NO"),
        (lambda bus: bus.follow("NO", ">", lambda _: None), "STREAM.INFO.NO"),
        (lambda bus: bus.stream_state("NO"), "STREAM.INFO.NO"),
        (lambda bus: bus.subject_counts("NO", ">"), "STREAM.INFO.NO"),
        (lambda bus: bus.purge("OK", ">"), "STREAM.PURGE.OK"),
        (lambda bus: bus.stream_of("no.a"), "STREAM.NAMES"),
        (lambda bus: bus.ensure_stream(StreamSpec("X", ("x",))), "STREAM.INFO.X"),
        (lambda bus: bus.subscribe("no.Events", ignore), "subscribe to no.Events"),
        (lambda bus: bus.subscribe("no.>", ignore, "group"), "subscribe to no.>"),
        (lambda bus: bus.subscribe(">", ignore), "subscribe to >"),
    ],
)
async def test_what_is_not_allowed_is_refused_at_once(
    limited: NatsBus, asks: Callable[[Bus], Awaitable[object]], what: str
) -> None:
    with denied(what):
        await asks(limited)
    assert limited.counters["denied"] == 1
    assert await limited.append("ok.a", b"") > 0
    assert (limited.connected, limited.counters["reconnects"]) == (True, 0)


async def test_a_publish_that_is_not_allowed_is_lost_counted_and_logged(worker: NatsBus, limited: NatsBus) -> None:
    with capture_logs() as logs:
        for _ in range(20):
            await limited.publish("no.a", b"")
        await eventually(lambda: limited.counters["denied"] == 20)
    assert (await worker.stream_state("NO")).messages == 0
    assert len(logs) == 1
    assert 'permissions violation for publish to "no.a"' in logs[0]["error"]


async def test_what_is_denied_disturbs_nothing_else(worker: NatsBus, limited: NatsBus) -> None:
    got: list[bytes] = []

    async def take(message: Incoming) -> None:
        got.append(message.data)
        if message.reply:
            await worker.publish(message.reply, b"answer")

    await limited.subscribe("ok.heard", take)
    results: list[object] = []

    async def attempt(subject: str) -> None:
        try:
            results.append(await limited.append(subject, b"x"))
        except BusError as error:
            results.append(type(error))

    async with anyio.create_task_group() as group:
        for i in range(20):
            group.start_soon(attempt, f"{'no' if i % 2 else 'ok'}.{i}")
    assert results.count(PermissionDenied) == 10
    assert sum(isinstance(result, int) for result in results) == 10
    await worker.publish("ok.heard", b"event")
    await eventually(lambda: got == [b"event"])


async def test_who_may_not_ask_for_streams_hears_that_there_is_no_answer(limited: NatsBus) -> None:
    start = time.monotonic()
    with pytest.raises(BusDisconnected, match="nowhere does not answer"):
        await limited.append("nowhere", b"")
    assert time.monotonic() - start < 1


async def test_who_may_not_hear_answers_is_told_so(server: EmbeddedNats, worker: NatsBus) -> None:
    bus = await NatsBus.connect(url(server, "deaf:sesame3"), name="deaf", wait=5)
    for attempt in (bus.request("ok.a", b"", 30), bus.pull("NO", "work", 1, 30), bus.append("ok.a", b"")):
        with denied("subscribe to _INBOX."):
            await attempt
    got: list[bytes] = []

    async def take(message: Incoming) -> None:
        got.append(message.data)

    await worker.subscribe("ok.deaf", take)
    await bus.publish("ok.deaf", b"event")
    await eventually(lambda: got == [b"event"])
    await bus.close()


async def test_rights_are_asked_for_anew_on_a_new_connection() -> None:
    with EmbeddedNats(config=users(WORKER, DEAF)) as server:
        bus = await NatsBus.connect(url(server, "deaf:sesame3"), name="deaf", wait=5)
        with denied("subscribe to _INBOX."):
            await bus.stream_of("a")
        server.kill()
        server.config = users(WORKER, "{ user: deaf, password: sesame3 }")
        await server.start_async()
        await eventually(lambda: bus.counters["reconnects"] == 1, within=15)
        assert await bus.stream_of("a") is None
        await bus.close()


async def test_the_bulk_connection_says_what_is_denied(server: EmbeddedNats, limited: NatsBus) -> None:
    def never(subject: str, seq: int, size: int, payload: Reader) -> None:
        raise AssertionError

    start = time.monotonic()
    link = limited.link()
    for expected in (int, SequenceConflict):
        (answer,) = link.put([Item("no.Bulk", (b"x",))], time.monotonic() + 30)
        assert isinstance(answer, PermissionDenied)
        assert "no.Bulk" in answer.message
        (answer,) = link.put([Item("ok.Bulk", (b"x",))], time.monotonic() + 30)
        assert isinstance(answer, expected)
        with denied("DIRECT.GET.OK"):
            link.get("OK", ["ok.Bulk"], never, time.monotonic() + 30)
    link.close()
    deaf = await NatsBus.connect(url(server, "deaf:sesame3"), name="deaf", wait=5)
    link = deaf.link()
    (answer,) = link.put([Item("ok.c", (b"x",))], time.monotonic() + 30)
    link.close()
    assert isinstance(answer, PermissionDenied)
    assert "_INBOX." in answer.message
    await deaf.close()
    assert time.monotonic() - start < 5


ASKED = "authorization { user: u, password: p }"
NOBODY = users("{ user: u, password: p }", "{ user: anonymous, password: a }") + "\nno_auth_user: anonymous"
OPERATORS_ONLY = "accounts { SYS { users = [ { user: admin, password: a } ] } }\nsystem_account: SYS"


@pytest.mark.parametrize(
    ("config", "login", "expected"),
    [
        ("", "", False),
        ("", "u:p", False),
        (ASKED, "u:p", True),
        ('authorization { token: "t" }', "t", True),
        (users("{ user: u, password: p }"), "u:p", True),
        ("accounts { A { users = [ { user: u, password: p } ] } }", "u:p", True),
        (NOBODY, "u:p", False),  # anybody gets in
        (NOBODY, "", False),
        (OPERATORS_ONLY, "", False),  # the server's first words ask for credentials, but it does without
        (OPERATORS_ONLY, "admin:a", False),
    ],
)
async def test_whether_the_server_asks_who_somebody_is(config: str, login: str, expected: bool) -> None:
    with EmbeddedNats(config=config) as server:
        bus = await NatsBus.connect(url(server, login), name="test", wait=5)
        await eventually(lambda: bus.authenticated is expected)
        await bus.close()


async def test_it_is_found_out_again_after_a_restart() -> None:
    with EmbeddedNats(config=ASKED) as server:
        bus = await NatsBus.connect(url(server, "u:p"), name="test", wait=5)
        for reconnects, (config, expected) in enumerate(((NOBODY, False), (ASKED, True), ("", False)), start=1):
            await eventually(lambda wanted=not expected: bus.authenticated is wanted)  # type: ignore[misc]
            server.kill()
            server.config = config
            await server.start_async()
            await eventually(lambda count=reconnects: bus.counters["reconnects"] == count, within=15)  # type: ignore[misc]
            await eventually(lambda wanted=expected: bus.authenticated is wanted)  # type: ignore[misc]
        await bus.close()
