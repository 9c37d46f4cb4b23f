"""The client on a real nats-server: what the in-memory bus cannot show."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.config import Settings
from shared.errors import DeadlineExceeded, DuplicateRequest, Overloaded, UnknownModel
from tests.fakes import FakeDecode
from trine.client import Client

pytestmark = pytest.mark.anyio
TEXT = "the quick brown fox jumps over the lazy dog and then sleeps"


@pytest.fixture
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


@pytest.fixture
async def client(server: EmbeddedNats) -> AsyncIterator[Client]:
    async with Client(server.url, "fake") as client:
        yield client


class Connections(AsyncExitStack):
    """Buses for fakes, closed at the end."""

    async def bus(self, server: EmbeddedNats) -> NatsBus:
        bus = await NatsBus.connect(server.url, name="fake", wait=5)
        self.push_async_callback(bus.close)
        return bus


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    async with Connections() as connections:
        yield connections


async def test_many_answers_at_once(server: EmbeddedNats, client: Client, connections: Connections) -> None:
    async with FakeDecode(await connections.bus(server), chunks=(1, 3)):
        texts = [f"request number {i} says {i * i}" for i in range(16)]
        answers = await asyncio.gather(*(client.generate(text) for text in texts))
    assert [answer.text for answer in answers] == texts


async def test_another_worker_goes_on(server: EmbeddedNats, client: Client, connections: Connections) -> None:
    first = FakeDecode(await connections.bus(server), worker="decode-1", dies_after=5)
    async with first:
        running = asyncio.create_task(client.generate(TEXT))
        await first.dead.wait()
        async with FakeDecode(await connections.bus(server), worker="decode-2"):
            completion = await running
    assert (completion.text, completion.served_by.decode, completion.attempts) == (TEXT, "decode-2", 2)


async def test_refusals(server: EmbeddedNats, client: Client, connections: Connections) -> None:
    with pytest.raises(UnknownModel, match="trine up"):
        await client.generate(TEXT)
    fake = FakeDecode(await connections.bus(server), settings=Settings(model_name="fake", max_queued=1))
    await fake.ensure_streams()
    waiting = asyncio.create_task(client.generate(TEXT, id="mine", deadline_ms=1500))
    await asyncio.sleep(0.2)
    with pytest.raises((DuplicateRequest, Overloaded)):  # the server looks at either first
        await client.generate(TEXT, id="mine")
    started = time.monotonic()
    with pytest.raises(Overloaded):
        await client.generate(TEXT)
    assert time.monotonic() - started < 1
    with pytest.raises(DeadlineExceeded):
        await waiting


async def test_the_server_is_killed_in_mid_stream_and_comes_back(
    server: EmbeddedNats, client: Client, connections: Connections
) -> None:
    """The event stream is gone, with the beginning of the answer: what is delivered stays right, to the last word."""
    async with FakeDecode(await connections.bus(server), pause=0.05):
        stream = client.stream(" ".join([TEXT] * 4), deadline_ms=30_000)
        text = ""
        async for delta in stream:
            text += delta.text
            if delta.index == 5:
                server.kill()
                await server.start_async()
        assert text == stream.completion.text == " ".join([TEXT] * 4)


async def test_the_server_stays_away(server: EmbeddedNats, client: Client, connections: Connections) -> None:
    async with FakeDecode(await connections.bus(server), pause=0.05):
        running = asyncio.create_task(client.generate(TEXT, deadline_ms=1500))
        await asyncio.sleep(0.3)
        server.kill()
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="NATS is not reachable"):
            await running
        assert time.monotonic() - started < 2
