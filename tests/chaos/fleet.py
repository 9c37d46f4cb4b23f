"""The fleet under attack: a nats-server with its store on disk, workers as real processes, a proxy between them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from tests.chaos.answers import BLOCK_SIZE
from tests.chaos.plan import FLEET
from tests.chaos.proxy import Proxy
from trine.beats import listen
from trine.supervisor import Fleet

ROOT = Path(__file__).parents[2]
READY_S = 120.0
RETURN_S = 60.0
SETTLE_S = 30.0
DRAIN_S = 10.0
GRACE_S = 10.0
"""For a process to end after its work has, with little of a core to itself."""
KV_BLOCKS = 400
MAX_QUEUED = 40
CACHE_BYTES = 8 << 20
DEAF_S = 15.0
"""So long a worker may take until it listens to signals: it imports torch first."""
_END = re.compile(r"(\S+) (?:was ended by (SIG\w+)|ended with exit code (\d+)) after ([\d.]+) s")


class ChaosFleet:
    """Enter it from the main thread's event loop. `problems`: each end of a worker that nobody asked for."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self.clocks = folder / "clocks"
        self.clocks.mkdir()
        memory = Path("/dev/shm")
        self._host = Path(tempfile.mkdtemp(prefix="trine-chaos-", dir=memory if memory.is_dir() else folder))
        self.host_cache = self._host / "blocks"
        self.server = EmbeddedNats(store_dir=folder / "nats")
        self.problems: list[str] = []
        self.ends: list[tuple[str, str]] = []
        self._model = model
        self._allowed: dict[str, list[str]] = {}
        self._stack = contextlib.AsyncExitStack()
        self.proxy: Proxy
        self.workers: Fleet

    async def __aenter__(self) -> ChaosFleet:
        self._stack.callback(shutil.rmtree, self._host, ignore_errors=True)
        self._stack.callback(self.server.stop)
        try:
            await self.server.start_async()
            self.proxy = await self._stack.enter_async_context(Proxy(self.server.port))
            self.workers = Fleet(
                FLEET,
                nats=self.proxy.url,
                env=self._settings(),
                role_env={"drafter": {"TRINE_DRAFT_SOURCE": "model", "TRINE_DRAFTER_LAYERS": "2"}},
                log=self._on_line,
            )
            await asyncio.to_thread(self.workers.start)
            self._stack.push_async_callback(asyncio.to_thread, self.workers.stop)
            await asyncio.to_thread(self.workers.wait_ready, READY_S)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _settings(self) -> dict[str, str]:
        return {
            "TRINE_MODEL": str(self._model),
            "TRINE_BLOCK_SIZE": str(BLOCK_SIZE),
            "TRINE_KV_BLOCKS": str(KV_BLOCKS),
            "TRINE_CACHE_BYTES": str(CACHE_BYTES),
            "TRINE_HOST_CACHE_DIR": str(self.host_cache),
            "TRINE_HOST_CACHE_MB": "4",
            "TRINE_MAX_QUEUED": str(MAX_QUEUED),
            "TRINE_LOCAL_PREFILL_TOKENS": "16",
            "TRINE_MAX_RUNNING": "8",
            "TRINE_DRAFT_ADAPTIVE": "false",
            "TRINE_DRAFT_DEPTH": "3",
            "TRINE_DRAIN_S": f"{DRAIN_S:g}",
            "TRINE_THREADS": "1",
            "TRINE_LOG_FORMAT": "json",
            "CHAOS_CLOCKS": str(self.clocks),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "clock"), str(ROOT)]),
        }

    def _on_line(self, name: str, line: str) -> None:
        """From reader threads."""
        with (self.folder / f"{name}.log").open("a") as log:
            log.write(line + "\n")
        if name == "supervisor" and (end := _END.match(line)):
            worker, how, lived_s = end[1], end[2] or end[3], float(end[4])
            self.ends.append((worker, how))
            allowed = self._allowed.get(worker, [])
            # A worker that has hardly begun to start does not listen yet: it ends as any process does.
            meant = "0" if how == "SIGTERM" and lived_s < DEAF_S else how
            if meant in allowed:
                allowed.remove(meant)
            else:
                tail = self.workers.tail(worker)[-1:]
                self.problems.append(f"{worker} ended by itself ({how}): {' '.join(tail)[-600:]}")

    def signal(self, worker: str, sign: signal.Signals) -> int:
        """Raises Unavailable when it does not run. An end by it is no problem."""
        if sign in (signal.SIGKILL, signal.SIGTERM):
            how = "SIGKILL" if sign is signal.SIGKILL else "0"
            self._allowed.setdefault(worker, []).append(how)
        return self.workers.kill(worker, sign)

    async def there(self, worker: str) -> int | None:
        """Its process id once it runs; None if it does not come."""
        deadline = time.monotonic() + RETURN_S
        while time.monotonic() < deadline:
            if pid := self.workers.pids().get(worker):
                return pid
            await asyncio.sleep(0.1)
        return None

    async def settle(self, bus: NatsBus) -> list[str]:
        """Wait until all workers serve, hold no work, and have all their blocks back. Returns what is not so."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            seen = await listen(bus, 2.5)
            wrong = [f"{name} is not heard" for name in self._names() if name not in {w for _, w in seen}]
            for (_, worker), beat in seen.items():
                if worker not in self._names():
                    continue
                held = 0 if beat.role == "drafter" else KV_BLOCKS - beat.load.free_blocks
                if beat.draining or beat.load.running or beat.load.waiting or held:
                    wrong.append(f"{worker} at rest: {beat.load!r}, {held} blocks held, draining {beat.draining}")
            if not wrong or time.monotonic() > deadline:
                return wrong

    async def drain(self) -> None:
        """SIGTERM to all; who does not end with 0 in time is a problem."""
        names = list(self.workers.pids())
        before = len(self.ends)
        for name in names:
            self.workers.hold(name)
            self.signal(name, signal.SIGTERM)
        deadline = time.monotonic() + DRAIN_S + GRACE_S
        while self.workers.pids() and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # the supervisor looks after them in turns
        drained = {worker for worker, how in self.ends[before:] if how == "0"}
        self.problems += [f"{name} does not drain" for name in names if name not in drained]

    def _names(self) -> list[str]:
        return [f"{role}-{n + 1}" for role, count in FLEET.items() for n in range(count)]
