"""`FleetRig` on a real nats-server, and workers with fake engines in processes of their own.

    python -m tests.nats_fleet ROLE URL NAME ENGINE SETTINGS BYTES

runs one until its standard input ends. ENGINE and SETTINGS are JSON: keyword arguments of `CrashEngine`, and of the
rig's start. BYTES: `freeze_after` of `worker_process`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.decode.service import DecodeWorker
from services.drafter.service import DrafterWorker
from services.prefill.service import PrefillWorker
from shared.bus import bulk_socket
from shared.bus.base import Incoming
from shared.bus.nats import NatsBus
from shared.codec import decode
from shared.engine.base import StepEngine
from shared.messages import Beat
from shared.subjects import Subjects
from tests.crash_engine import CrashEngine
from tests.fleet_rig import MODEL
from tests.nats_rig import NatsRig

SUBJECTS = Subjects(MODEL)
ROOT = Path(__file__).parents[1]
WAIT_S = 10.0


class NatsFleet(NatsRig):
    """Ask it through `Client(url, MODEL)`."""

    def __init__(self, url: str) -> None:
        super().__init__([])
        self.url = url

    async def __aenter__(self) -> NatsFleet:
        await super().__aenter__()
        return self

    async def decode(self, name: str = "decode-1", engine: StepEngine | None = None, **overrides: Any) -> DecodeWorker:
        await self._connect(name)
        return await super().decode(name, engine, **overrides)

    async def prefill(
        self, name: str = "prefill-1", engine: StepEngine | None = None, **overrides: Any
    ) -> PrefillWorker:
        await self._connect(name)
        return await super().prefill(name, engine, **overrides)

    async def drafter(self, name: str = "drafter-1", *args: Any, **overrides: Any) -> DrafterWorker:
        await self._connect(name, "control")
        return await super().drafter(name, *args, **overrides)

    async def _connect(self, name: str, *purposes: str) -> None:
        """Connections are made before a worker is, and `bus` hands them out."""
        for purpose in purposes or ("control", "bulk"):
            self._spare.append(await NatsBus.connect(self.url, name=f"{name}/{purpose}", wait=WAIT_S))


@contextmanager
def worker_process(
    role: str,
    url: str,
    name: str,
    *,
    engine: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    freeze_after: int = 0,
    **settings: Any,
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that is ready, in a process that is killed at the end.

    It stops itself as SIGSTOP does, once, when it has received `freeze_after` bytes of the cache, if that is not 0.
    """
    options = json.dumps(engine), json.dumps(settings), str(freeze_after)
    command = [sys.executable, "-m", "tests.nats_fleet", role, url, name, *options]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **(env or {})}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line == b"it serves\n":
                break
        else:
            raise AssertionError(f"{name} has ended with {process.wait(5)}")
        yield process
    finally:
        process.kill()
        process.communicate()


def stopped(process: subprocess.Popen[bytes]) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


async def beat_when(bus: NatsBus, worker: str, holds: Callable[[Beat], bool]) -> Beat:
    """The first of the worker's beats for which `holds` is true."""
    found: asyncio.Future[Beat] = asyncio.get_running_loop().create_future()

    async def look(message: Incoming) -> None:
        beat = decode(message.data, Beat)
        if beat.worker == worker and holds(beat) and not found.done():
            found.set_result(beat)

    subscription = await bus.subscribe(SUBJECTS.beats, look)
    try:
        return await asyncio.wait_for(found, WAIT_S)
    finally:
        await subscription.unsubscribe()


def _freeze_after(received: int) -> None:
    """Stop this process, once, when it has so many bytes from the cache. Its kernel keeps little for a socket."""
    dial, some, left = bulk_socket._dial, bulk_socket._some, received

    def narrow(host: str, port: int, deadline: float) -> socket.socket:
        connection = dial(host, port, deadline)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        return connection

    def counted(count: int) -> int:
        nonlocal left
        if 0 < left <= count:
            os.kill(os.getpid(), signal.SIGSTOP)
        left -= count
        return some(count)

    bulk_socket._dial, bulk_socket._some = narrow, counted


async def _serve(role: str, url: str, name: str, engine: str, settings: str, freeze_after: str) -> None:
    if int(freeze_after):
        _freeze_after(int(freeze_after))
    async with NatsFleet(url) as rig:
        starts: dict[str, Callable[..., Awaitable[object]]]
        starts = {"decode": rig.decode, "prefill": rig.prefill, "drafter": rig.drafter}
        await starts[role](name, CrashEngine(**json.loads(engine)), **json.loads(settings))
        print("it serves", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
