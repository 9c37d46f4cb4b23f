"""The gateway on a port of its own, before a fleet with fake engines: all in this process and on one event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx2
from openai import AsyncOpenAI

from services.gateway.config import GatewaySettings
from services.gateway.gateway import Gateway
from services.gateway.server import GatewayServer
from shared.bus.base import Bus
from tests.fleet_rig import MODEL, FleetRig

DEFAULTS: dict[str, Any] = {
    "model_name": MODEL,
    "port": 0,
    "peer_timeout_s": 1.0,
    "worker_wait_s": 0.4,
    "drain_s": 2.0,
    "read_s": 0.5,
    "write_s": 0.5,
}


class GatewayRig:
    def __init__(self, gateway: Gateway, server: GatewayServer, running: asyncio.Task[None]) -> None:
        self.gateway = gateway
        self.server = server
        self.running = running
        self.http = httpx2.AsyncClient(base_url=server.address, timeout=10)

    def openai(self, key: str = "none", retries: int = 0) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.server.address}/v1", api_key=key, max_retries=retries, timeout=10)

    async def raw(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which `data` is sent, and little of what comes is kept by the system."""
        host, port = self.server.address.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=connection)
        writer.write(data)
        return reader, writer

    async def ask(self, path: str, body: Any) -> asyncio.StreamWriter:
        """A request whose answer nobody reads."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        _, writer = await self.raw(head.encode() + data)
        return writer

    async def hears(self, fleet: FleetRig) -> None:
        """Until each worker has told of all that it did before this call: the second beat from now was made since."""
        await self._hears_anew(fleet, self._heard())
        await self._hears_anew(fleet, self._heard())

    async def _hears_anew(self, fleet: FleetRig, before: dict[str, float]) -> None:
        await eventually(lambda: all(self._heard().get(n, 0.0) > before.get(n, 0.0) for n in fleet.workers))

    def _heard(self) -> dict[str, float]:
        models = self.gateway.fleet.roster.models.values()
        return {worker: heard.at for model in models for (_, worker), heard in model.workers.items()}

    @property
    def running_answers(self) -> int:
        return self.gateway.admission.running


@asynccontextmanager
async def gateway_on(fleet: FleetRig, **overrides: Any) -> AsyncIterator[GatewayRig]:
    gateway = Gateway(GatewaySettings(**{**DEFAULTS, **overrides}), cast("Bus", fleet.bus("gateway")))
    server = GatewayServer(gateway)
    running = asyncio.create_task(server.serve())
    async with asyncio.timeout(5):
        while not server.started:
            await asyncio.sleep(0.005)
    rig = GatewayRig(gateway, server, running)
    await eventually(lambda: gateway.trouble() is None or not fleet.workers)
    try:
        yield rig
    finally:
        await rig.http.aclose()
        server.should_exit = True
        gateway.end()
        async with asyncio.timeout(10):
            await running


async def eventually(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def events(text: str) -> list[tuple[str, Any]]:
    """(id, data) of server-sent events; `[DONE]` is a text."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            data = lines["data"]
            found.append((lines.get("id", ""), data if data == "[DONE]" else json.loads(data)))
    return found


def said(found: list[tuple[str, Any]]) -> str:
    """The text in these events, of one choice."""
    choices = [choice for _, data in found if data != "[DONE]" for choice in data.get("choices", [])]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
