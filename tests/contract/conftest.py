"""The bus in two worlds, in memory and on a real nats-server, both with hooks to break the connection."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Protocol

import anyio
import pytest
from structlog.testing import capture_logs

from shared.bus.base import Bus
from shared.bus.embedded import EmbeddedNats
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.nats import NatsBus

MAX_PAYLOAD = 1 << 20


async def eventually(condition: Callable[[], bool | Awaitable[bool]], within: float = 5.0) -> None:
    """Wait until `condition` holds; fail when it does not within so many seconds."""
    deadline = time.monotonic() + within
    while True:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return
        assert time.monotonic() < deadline, "did not happen in time"
        await anyio.sleep(0.005)


class World(Protocol):
    name: str
    """Differs between tests; part of every stream and subject they use."""

    async def connect(self) -> Bus: ...
    async def outage(self) -> None:
        """The server dies; returns when every connection has noticed."""
        ...

    async def recovery(self) -> None:
        """The server is back, without its memory streams; returns when every connection is back too."""
        ...

    async def close(self) -> None: ...


class MemoryWorld:
    def __init__(self) -> None:
        self.name = "t" + uuid.uuid4().hex[:8]
        self._broker = MemoryBroker()
        self._buses: list[MemoryBus] = []

    async def connect(self) -> Bus:
        bus = MemoryBus(self._broker, max_payload=MAX_PAYLOAD - 4096)
        self._buses.append(bus)
        return bus

    async def outage(self) -> None:
        self._broker.disconnect()

    async def recovery(self) -> None:
        self._broker.wipe_memory_streams()
        self._broker.reconnect()

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()


class NatsWorld:
    def __init__(self, server: EmbeddedNats) -> None:
        self.name = "t" + uuid.uuid4().hex[:8]
        self._server = server
        self._buses: list[NatsBus] = []

    async def connect(self) -> Bus:
        bus = await NatsBus.connect(self._server.url, name=self.name, wait=5)
        self._buses.append(bus)
        return bus

    async def outage(self) -> None:
        self._server.kill()
        await eventually(lambda: not any(bus.connected for bus in self._buses))

    async def recovery(self) -> None:
        await self._server.start_async()
        await eventually(lambda: all(bus.connected for bus in self._buses), within=15)

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()
        if not self._server.running:
            await self._server.start_async()


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """What was logged; also keeps expected errors out of the terminal."""
    with capture_logs() as entries:
        yield entries


@pytest.fixture(scope="session")
def nats_server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats(max_payload=MAX_PAYLOAD) as server:
        yield server


@pytest.fixture(params=["memory", "nats"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made: World = MemoryWorld() if request.param == "memory" else NatsWorld(request.getfixturevalue("nats_server"))
    yield made
    await made.close()


@pytest.fixture
async def bus(world: World) -> Bus:
    return await world.connect()


@pytest.fixture
async def other(world: World) -> Bus:
    """A second connection."""
    return await world.connect()
