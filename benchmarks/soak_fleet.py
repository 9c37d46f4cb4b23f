"""The fleet that is soaked, and how it is read: from /proc, from its beats, and from nats-server's monitoring."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.prefix_fleet import require
from benchmarks.soak_readings import Process, Reading
from shared.bus.base import Incoming
from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.codec import decode
from shared.messages import Beat
from shared.streams import MEMORY_STREAMS
from shared.subjects import Subjects
from trine.supervisor import Fleet

MiB = 1 << 20
COUNTS = {"prefill": 1, "decode": 2, "drafter": 1}
NAME = "soak"
CACHE_BYTES = 2 * MiB
READY_S = 180.0
QUIET_S = 15.0
"""Within so long after the load no request is left and no block in use, or they are kept for good."""
# Everything that fills up on purpose is small, so that it is full before the first round.
ENV = {
    "TRINE_MODEL_NAME": NAME,
    "TRINE_KV_CODEC": "none",
    "TRINE_WEIGHTS": "native",
    "TRINE_THREADS": "1",
    "TRINE_BEAT_S": "0.5",
    "TRINE_KV_BLOCKS": "384",
    "TRINE_CACHE_BYTES": str(CACHE_BYTES),
    "TRINE_HOST_CACHE_MB": "2",
    "TRINE_LOCAL_PREFILL_TOKENS": "64",
    "TRINE_MAX_QUEUED": "64",
    "TRINE_HISTORY_TOKENS": "4000",
    "TRINE_LOG_LEVEL": "warning",
}


@dataclass(frozen=True, slots=True)
class Soaked:
    fleet: Fleet
    server: EmbeddedNats
    monitoring: str
    """The URL of nats-server's own account of itself."""
    profiling: str
    """And of its profiles, which collect garbage when asked to."""
    blocks: Path
    """The folder of blocks that the workers of this machine share."""


@contextmanager
def soaked(model: str | None) -> Iterator[Soaked]:
    """A fleet that is ready, of `model` or of a tiny random one, on a server of its own."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trine-soak-")))
        blocks = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trine-soak-", dir=_memory())))
        env = ENV | {"TRINE_HOST_CACHE_DIR": str(blocks), **({"TRINE_MODEL": model} if model else _tiny(place))}
        store, port = place / "nats", _free_port()
        # What nats-server's collector leaves for later is then a fifth of what is kept, not as much again.
        os.environ.setdefault("GOGC", "20")
        # Of connections that ended it keeps records for operators, up to 10,000 unless told otherwise.
        config = f'http: "127.0.0.1:-1"\nprof_port: {port}\nmax_closed_clients: 16'
        server = EmbeddedNats(store_dir=store, max_memory_store=CACHE_BYTES + MEMORY_STREAMS, config=config)
        with server, Fleet(COUNTS, nats=server.url, env=env) as fleet:
            ports = json.loads((store / f"nats-server_{server.pid}.ports").read_text())
            fleet.wait_ready(READY_S)
            yield Soaked(fleet, server, ports["monitoring"][0], f"http://127.0.0.1:{port}", blocks)


def _trim() -> None:
    """Give free pages of this process back, where its C library can."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _memory() -> str | None:
    """A folder in memory, if this machine has one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _tiny(place: Path) -> dict[str, str]:
    folder = place / "model"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "benchmarks.soak_model", str(folder)], check=True, timeout=120)
    return {"TRINE_MODEL": str(folder), "TRINE_DRAFTER_MODEL": str(folder)}


def process(pid: int | str) -> Process:
    """As the kernel counts it."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    handles = len(os.listdir(f"/proc/{pid}/fd"))
    return Process(int(status["VmRSS"].split()[0]) * 1024, handles, int(status["Threads"]))


class Watch:
    """Hears the fleet's beats, and reads the fleet when asked to."""

    def __init__(self, soaked: Soaked) -> None:
        self._soaked = soaked
        self._subjects = Subjects(NAME)
        self._beats: dict[str, Beat] = {}
        self.total_blocks = 0
        self.most_in_use = 0
        """Since it was last set to 0."""

    async def __aenter__(self) -> Watch:
        self._bus = await NatsBus.connect(self._soaked.server.url, name="soak-watch", wait=10.0)
        await self._bus.subscribe(self._subjects.beats, self._on_beat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._bus.close()

    async def _on_beat(self, message: Incoming) -> None:
        beat = decode(message.data, Beat)
        if beat.role == "decode":
            self._beats[beat.worker] = beat
            self.total_blocks = max(self.total_blocks, self._free)
            self.most_in_use = max(self.most_in_use, self.total_blocks - self._free)

    @property
    def _free(self) -> int:
        return sum(beat.load.free_blocks for beat in self._beats.values())

    @property
    def _serving(self) -> int:
        return sum(beat.load.running + beat.load.waiting for beat in self._beats.values())

    def forget_host_blocks(self) -> None:
        """The workers' shared files go; what was in them is found on NATS, or computed."""
        for file in self._soaked.blocks.rglob("*"):
            if file.is_file():
                file.unlink(missing_ok=True)

    async def quiet(self, rest_s: float) -> Reading:
        """Wait until the load has gone, but not for ever, and `rest_s` more for what is kept for a while only; then
        read.
        """
        ends = time.monotonic() + QUIET_S
        while (self._serving or self._free < self.total_blocks) and time.monotonic() < ends:
            await asyncio.sleep(0.2)
        # Kept for half an hour by design, which is longer than this takes.
        for stream in (self._subjects.event_stream, self._subjects.attempt_stream, self._subjects.claim_stream):
            await self._bus.purge(stream, ">")
        least: dict[str, int] = {}
        for _ in range(math.ceil(rest_s)):
            # Garbage is not kept, but nats-server collects it late when it has nothing to do, and the client's own
            # allocator keeps pages for what may come.
            _fetched(f"{self._soaked.profiling}/debug/pprof/heap?gc=1")
            gc.collect()
            _trim()
            await asyncio.sleep(1.0)
            for name, pid in self._pids().items():
                least[name] = min(process(pid).rss, least.get(name, 1 << 62))
        reading = self._read()
        return replace(reading, processes={name: replace(p, rss=least[name]) for name, p in reading.processes.items()})

    def _pids(self) -> dict[str, int | str]:
        return {**self._soaked.fleet.pids(), "nats-server": self._soaked.server.pid or 0, "client": "self"}

    def _read(self) -> Reading:
        restarts = {name: count for name, count in self._soaked.fleet.restarts().items() if count}
        require(not restarts, f"workers were started again: {restarts}")
        varz, jsz = self._asked("varz"), self._asked("jsz?streams=true")
        streams = [s["state"] | {"name": s["name"]} for a in jsz["account_details"] for s in a["stream_detail"]]
        queued = sum(s["messages"] for s in streams if s["name"] == self._subjects.request_stream)
        return Reading(
            {name: process(pid) for name, pid in self._pids().items()},
            free_blocks=self._free,
            requests=self._serving + queued,
            consumers=sum(s["consumer_count"] for s in streams),
            subscriptions=varz["subscriptions"],
            connections=varz["connections"],
            stored=sum(s["bytes"] for s in streams),
        )

    def _asked(self, path: str) -> Any:
        return json.loads(_fetched(f"{self._soaked.monitoring}/{path}"))


def _fetched(url: str) -> bytes:
    """Blocking, which is right while nothing else goes on: a thread would have memory of its own."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())
