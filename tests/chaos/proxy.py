"""A TCP proxy on loopback in front of nats-server, that breaks connections of whom it is told."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

CHUNK = 1 << 16
SLOW_S = 0.08
"""By which each piece is late on a slow connection."""
_NAME = re.compile(rb'"name"\s*:\s*"([^"]*)"')


@dataclass
class Trouble:
    """`name` is the beginning of the connections' names. Bytes are held back, or each piece comes `delay` late."""

    name: str
    delay: float | None


class Connection:
    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.writers = (client, server)
        self.name = ""

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """`url` is where to connect. Connections are told apart by the name that they give to NATS."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._troubles: list[Trouble] = []
        self._changed = asyncio.Event()
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self, name: str) -> int:
        """Break the connections whose names begin so; returns how many."""
        hit = [c for c in self._connections if c.name.startswith(name)]
        for connection in hit:
            connection.abort()
        return len(hit)

    @contextlib.asynccontextmanager
    async def trouble(self, name: str, delay: float | None = None) -> AsyncIterator[None]:
        """Within it nothing gets through on such connections, or all of it `delay` seconds late."""
        trouble = Trouble(name, delay)
        self._troubles.append(trouble)
        try:
            yield
        finally:
            self._troubles.remove(trouble)
            self._changed.set()
            self._changed = asyncio.Event()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        connection = Connection(writer, far_writer)
        self._connections.add(connection)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass_on(connection, source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, connection: Connection, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        outward = sink is connection.writers[1]
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK):
                if outward and not connection.name and (named := _NAME.search(data)):
                    connection.name = named[1].decode(errors="replace")
                await self._hold(connection)
                sink.write(data)
                await sink.drain()
        connection.abort()
        self._connections.discard(connection)

    async def _hold(self, connection: Connection) -> None:
        while hit := [t for t in self._troubles if connection.name.startswith(t.name)]:
            delay = hit[0].delay
            if delay is not None:
                await asyncio.sleep(delay)
                return
            await self._changed.wait()
