"""Three nats-servers on this machine with the configuration of deploy/cluster: started, killed, started again."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from shared.bus.base import Bus
from shared.bus.embedded import find_server, tied
from shared.errors import BusError

CONF = Path(__file__).parents[1] / "deploy" / "cluster"
NAMES = ("a", "b", "c")
STEADY_S = 30.0
STOP_S = 5.0
POLL_S = 0.05


@dataclass
class Server:
    """One of the three. `env` tells it who it is."""

    name: str
    port: int
    monitor: int
    conf: Path
    env: Mapping[str, str]
    log: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Only starts: see `Cluster.steady`."""
        with self.log.open("ab") as log:
            command = tied([str(find_server()), "-c", str(self.conf)])
            env = {**os.environ, **self.env}
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)

    def kill(self) -> None:
        """As a crash: what it held in memory is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_S)

    def healthy(self) -> bool:
        """Whether it has caught up with all streams and consumers that it keeps. Blocking."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.monitor}/healthz", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


class Cluster:
    """A context manager. `conf`: the file that each server is started with; `env`: what else it needs to know."""

    def __init__(self, conf: str = "nats.conf", env: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="trine-cluster-")
        ports = _free_ports(3 * len(NAMES))
        routes = dict(zip(NAMES, ports, strict=False))
        self.servers = {
            name: Server(
                name,
                port=ports[3 + i],
                monitor=ports[6 + i],
                conf=CONF / conf,
                env={**(env or {}), **self._env(name, ports[3 + i], ports[6 + i], routes)},
                log=Path(self._folder.name) / f"{name}.log",
            )
            for i, name in enumerate(NAMES)
        }

    def _env(self, name: str, port: int, monitor: int, routes: Mapping[str, int]) -> dict[str, str]:
        others = [f"nats://127.0.0.1:{route}" for other, route in routes.items() if other != name]
        return {
            "TRINE_NATS_SERVER_NAME": name,
            "TRINE_NATS_SERVER_LISTEN": f"127.0.0.1:{port}",
            "TRINE_NATS_SERVER_MONITOR": f"127.0.0.1:{monitor}",
            "TRINE_NATS_SERVER_STORE": str(Path(self._folder.name) / name),
            "TRINE_NATS_ROUTES_LISTEN": f"127.0.0.1:{routes[name]}",
            "TRINE_NATS_ROUTES": json.dumps(others),
        }

    @property
    def url(self) -> str:
        """The addresses of all, separated by commas."""
        return ",".join(f"nats://127.0.0.1:{server.port}" for server in self.servers.values())

    def start(self) -> None:
        for server in self.servers.values():
            server.start()

    def stop(self) -> None:
        for server in self.servers.values():
            server.kill()
        self._folder.cleanup()

    async def steady(self) -> None:
        """Wait until all servers run and have caught up. Raises TimeoutError, with what they said last."""
        deadline = time.monotonic() + STEADY_S
        while not all([await asyncio.to_thread(server.healthy) for server in self.servers.values()]):
            if time.monotonic() > deadline:
                said = "\n".join(server.log.read_text(errors="replace")[-1000:] for server in self.servers.values())
                raise TimeoutError(f"the cluster is not steady after {STEADY_S:g} s:\n{said}")
            await asyncio.sleep(POLL_S)

    async def __aenter__(self) -> Cluster:
        self.start()
        try:
            await self.steady()
        except BaseException:
            self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()


async def stream_info(bus: Bus, stream: str) -> dict[str, Any]:
    """What JetStream says of a stream: `config`, `cluster`, `state`. Raises BusError."""
    answer: dict[str, Any] = json.loads((await bus.request(f"$JS.API.STREAM.INFO.{stream}", b"", 2.0)).data)
    if "cluster" not in answer:
        raise BusError(f"{stream}: {answer.get('error')}")
    return answer


async def leaders(bus: Bus, streams: Sequence[str]) -> dict[str, str]:
    """The server that leads each stream, "" for none just now."""

    async def leader(stream: str) -> str:
        try:
            return str((await stream_info(bus, stream))["cluster"].get("leader", ""))
        except BusError:
            return ""

    return dict(zip(streams, await asyncio.gather(*map(leader, streams)), strict=True))


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
