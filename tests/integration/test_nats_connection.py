"""The connection to NATS when the server comes late, hangs, restarts, or ends the connection."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import anyio
import pytest
from structlog.testing import capture_logs

from shared.bus import nats_client, nats_receivers
from shared.bus.base import Incoming
from shared.bus.embedded import EmbeddedNats, find_server
from shared.bus.nats import NatsBus
from shared.errors import BusDisconnected, ConfigError
from tests.contract.conftest import eventually

pytestmark = pytest.mark.anyio


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedNats]:
    with EmbeddedNats() as running:
        yield running


async def echo(bus: NatsBus, subject: str) -> list[bytes]:
    got: list[bytes] = []

    async def handler(message: Incoming) -> None:
        got.append(message.data)
        if message.reply:
            await bus.publish(message.reply, message.data)

    await bus.subscribe(subject, handler)
    return got


async def test_a_server_that_comes_late_is_waited_for() -> None:
    server = EmbeddedNats(port=free_port())
    buses: list[NatsBus] = []

    async def connect(wait: float | None) -> None:
        buses.append(await NatsBus.connect(server.url, name="early", wait=wait))

    with capture_logs() as logs:
        async with anyio.create_task_group() as group:
            group.start_soon(connect, None)
            group.start_soon(connect, 20.0)
            await anyio.sleep(1.2)
            assert not buses
            await server.start_async()
            with anyio.fail_after(3):
                while len(buses) < 2:
                    await anyio.sleep(0.01)
    waiting = [entry for entry in logs if entry["event"] == "NATS error"]
    assert len(waiting) == 2  # and not one for each attempt
    assert str(server.port) in waiting[0]["server"]
    for bus in buses:
        assert bus.connected
        assert bus.counters["reconnects"] == 0
        await bus.close()
    server.stop()


async def test_waiting_for_a_server_ends_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(BusDisconnected, match=r"within 0\.4 s") as caught:
        await NatsBus.connect(f"nats://user:secret@127.0.0.1:{free_port()}", name="x", wait=0.4)
    assert 0.3 < time.monotonic() - start < 2
    assert "secret" not in caught.value.message


@contextmanager
def plain_server(*options: str) -> Iterator[str]:
    """The address of a nats-server without JetStream."""
    port = free_port()
    command = [str(find_server()), "-a", "127.0.0.1", "-p", str(port), *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(5)


async def test_refused_credentials_are_a_config_error() -> None:
    with plain_server("--user", "u", "--pass", "right") as address:
        bus = await NatsBus.connect(f"nats://u:right@{address}", name="x", wait=5)
        with pytest.raises(ConfigError, match="refuses our credentials") as caught:
            await NatsBus.connect(f"nats://u:wrong@{address}", name="x")
        assert "wrong" not in caught.value.message
        await bus.close()


async def test_a_nats_server_without_jetstream_is_named_as_such() -> None:
    with plain_server() as address:
        bus = await NatsBus.connect(f"nats://{address}", name="x", wait=5)
        with pytest.raises(BusDisconnected, match="JetStream"):
            await bus.append("a", b"")
        with pytest.raises(BusDisconnected, match="JetStream"):
            await bus.pull("S", "c", 1, 1)
        await bus.close()


async def test_a_connection_that_the_server_ends_is_made_anew(server: EmbeddedNats) -> None:
    bus = await NatsBus.connect(server.url, name="cut", wait=5)
    got = await echo(bus, "hello")
    back: list[bool] = []

    async def reconnected() -> None:
        back.append(bus.connected)

    bus.on_reconnect(reconnected)
    # What the bus itself never does: the headers lift the message over max_payload. nats-py then gives up for good.
    client = bus._connection._client
    await client.publish("hello", b"x" * client.max_payload, headers={"K": "v" * 100})
    await eventually(lambda: client.is_closed)
    await eventually(lambda: back == [True])
    assert bus.counters["reconnects"] == 1
    assert (await bus.request("hello", b"again", 2)).data == b"again"
    assert got == [b"again"]
    await bus.close()


async def test_dropped_messages_are_counted(server: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_receivers, "MAX_PENDING_MESSAGES", 100)
    bus = await NatsBus.connect(server.url, name="slow", wait=5)
    sender = await NatsBus.connect(server.url, name="fast", wait=5)
    release = anyio.Event()
    got: list[bytes] = []

    async def slow(message: Incoming) -> None:
        await release.wait()
        got.append(message.data)

    await bus.subscribe("flood", slow)
    for i in range(1000):
        await sender.publish("flood", b"%d" % i)
    await eventually(lambda: bus.counters["slow_consumer"] >= 899)
    release.set()
    await eventually(lambda: len(got) + bus.counters["slow_consumer"] == 1000)
    assert bus.connected
    await bus.close()
    await sender.close()


async def test_a_server_that_hangs_is_noticed(server: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_client, "PING_INTERVAL", 0.2)
    monkeypatch.setattr(nats_client, "FLUSH_TIMEOUT", 0.5)
    bus = await NatsBus.connect(server.url, name="patient", wait=5)
    got = await echo(bus, "hello")

    async def publish_for_ever() -> None:
        while True:
            await bus.publish("hello", b"x" * 1_000_000)

    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(bus.request("hello", b"", 60))
    try:
        with pytest.raises(BusDisconnected), anyio.fail_after(10):
            await publish_for_ever()
        with pytest.raises(BusDisconnected), anyio.fail_after(5):
            await waiting
        assert not bus.connected
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await eventually(lambda: bus.connected, within=15)
    await eventually(lambda: bus.counters["reconnects"] >= 1)
    got.clear()
    assert (await bus.request("hello", b"again", 2)).data == b"again"
    await bus.close()


async def test_close_does_not_wait_for_a_server_that_hangs(server: EmbeddedNats) -> None:
    bus = await NatsBus.connect(server.url, name="leaving", wait=5)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with anyio.fail_after(6):
            await bus.close()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert not bus.connected


async def test_close_sends_what_was_published(server: EmbeddedNats) -> None:
    listener = await NatsBus.connect(server.url, name="listener", wait=5)
    got = await echo(listener, "last")
    bus = await NatsBus.connect(server.url, name="leaving", wait=5)
    for i in range(100):
        await bus.publish("last", b"%d" % i)
    await bus.close()
    await eventually(lambda: len(got) == 100)
    await listener.close()


async def test_case_79_many_clients_knock_at_different_moments_and_are_all_back(server: EmbeddedNats) -> None:
    """While the server is away, something counts who knocks at its port."""
    knocks: list[float] = []

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knocks.append(time.monotonic())
        writer.close()

    buses = [await NatsBus.connect(server.url, name=f"n{i}", wait=5) for i in range(50)]
    counts = [await echo(bus, f"hello.{i}") for i, bus in enumerate(buses)]
    server.kill()
    down = time.monotonic()
    async with await asyncio.start_server(refuse, "127.0.0.1", server.port):
        await anyio.sleep(3)
    moments = [int((knock - down) * 20) for knock in knocks if knock - down >= 0.5]
    assert max(moments.count(moment) for moment in moments) < 15, "many in the same 50 ms"
    assert sum(2 <= knock - down < 3 for knock in knocks) < 3 * 50, "they knock without rest"
    await server.start_async()
    await eventually(lambda: all(bus.connected for bus in buses), within=15)
    for i, bus in enumerate(buses):
        await bus.request(f"hello.{i}", b"", 2)
    assert all(len(got) == 1 for got in counts)
    for bus in buses:
        await bus.close()
