"""How each kind of fault is done. Each returns when it is over; whether the fleet recovers is seen elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
from collections.abc import Awaitable, Callable
from typing import ClassVar

from shared.bus.nats import NatsBus
from shared.errors import BusError, ConfigError, Unavailable
from shared.subjects import Subjects
from tests.chaos import hostile
from tests.chaos.fleet import CACHE_BYTES, MAX_QUEUED, ChaosFleet
from tests.chaos.plan import Fault
from tests.chaos.proxy import SLOW_S

JUMP_S = 3600.0
AWAY_S = 3.0
"""The longest that a nats-server stays away."""
TINY_FILE = 4096
PREFILL_FLOOD = 4 << 20


class Faults:
    """Do them to a fleet. `bus` is a connection of the attacker's own, not through the proxy."""

    def __init__(self, fleet: ChaosFleet, bus: NatsBus, model: str) -> None:
        self._fleet = fleet
        self._bus = bus
        self._subjects = Subjects(model)
        self._server = asyncio.Lock()
        self._workers: dict[str, asyncio.Lock] = {}
        """One thing at a time is done to a worker's process, or to the server's."""

    async def inject(self, fault: Fault, begun: Callable[[], None]) -> None:
        """`begun` is called when it happens. Raises nothing that a fault in the fleet could be the reason of."""
        act = fault.kind.partition(" ")[0]
        with contextlib.suppress(BusError, ConfigError):
            if fault.kind.endswith("nats"):
                async with self._server:
                    await self._nats(act, fault, begun)
            elif act in ("kill", "stop", "drain") or fault.kind in ("fill disk", "jump clock"):
                async with self._workers.setdefault(fault.victim, asyncio.Lock()):
                    await self._process(act, fault, begun)
            else:
                begun()
                await self._ways[fault.kind](self, fault)

    async def _nats(self, act: str, fault: Fault, begun: Callable[[], None]) -> None:
        server, away = self._fleet.server, min(fault.lasts, AWAY_S)
        begun()
        if act == "stop":
            pid = server.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.lasts)
            finally:
                os.kill(pid, signal.SIGCONT)
            return
        await asyncio.to_thread(server.kill if act == "kill" else server.stop)
        await asyncio.sleep(away)
        await server.start_async()

    async def _process(self, act: str, fault: Fault, begun: Callable[[], None]) -> None:
        pid = await self._fleet.there(fault.victim)
        if pid is None:
            self._fleet.problems.append(f"{fault.victim} did not come back")
            return
        begun()
        with contextlib.suppress(Unavailable, ProcessLookupError):
            if act == "kill":
                self._fleet.signal(fault.victim, signal.SIGKILL)
            elif act == "drain":
                self._fleet.signal(fault.victim, signal.SIGTERM)
                await self._gone(fault.victim, pid)
            elif act == "stop":
                self._fleet.signal(fault.victim, signal.SIGSTOP)
                await asyncio.sleep(fault.lasts)
                os.kill(pid, signal.SIGCONT)
            elif act == "jump":
                await self._jump(fault)
            else:
                await self._no_room(pid, fault.lasts)

    async def _gone(self, worker: str, pid: int) -> None:
        """Nothing else is done to it while it drains."""
        while self._fleet.workers.pids().get(worker) == pid:
            await asyncio.sleep(0.1)

    async def _jump(self, fault: Fault) -> None:
        clock = self._fleet.clocks / fault.victim
        whole = clock.with_suffix(".new")  # nobody reads half of it
        whole.write_text(str(random.Random(fault.seed).choice((-JUMP_S, JUMP_S))))
        whole.rename(clock)
        await asyncio.sleep(fault.lasts)
        clock.unlink()

    async def _no_room(self, pid: int, seconds: float) -> None:
        """No file of this process may grow: to it the disk is full."""
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (TINY_FILE, hard))
        await asyncio.sleep(seconds)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))

    async def _cut(self, fault: Fault) -> None:
        async with self._fleet.proxy.trouble(fault.victim):
            await asyncio.sleep(fault.lasts)

    async def _cut_bulk(self, fault: Fault) -> None:
        async with self._fleet.proxy.trouble(f"{fault.victim}/bulk"):
            await asyncio.sleep(fault.lasts)

    async def _slow(self, fault: Fault) -> None:
        async with self._fleet.proxy.trouble(fault.victim, SLOW_S):
            await asyncio.sleep(fault.lasts)

    async def _reset(self, fault: Fault) -> None:
        self._fleet.proxy.reset(fault.victim)

    async def _reset_bulk(self, fault: Fault) -> None:
        for _ in range(int(fault.lasts)):
            self._fleet.proxy.reset(f"{fault.victim}/bulk")
            await asyncio.sleep(0.5)

    async def _damage_host_cache(self, fault: Fault) -> None:
        """Files shortened, overwritten or gone while others read them."""
        rng = random.Random(fault.seed)
        for _ in range(int(fault.lasts)):
            for file in list(self._fleet.host_cache.glob("*"))[:50]:
                with contextlib.suppress(OSError):
                    way = rng.randrange(3)
                    if way == 0:
                        os.truncate(file, rng.randrange(100))
                    elif way == 1:
                        with file.open("r+b") as opened:
                            opened.seek(rng.randrange(4096))
                            opened.write(rng.randbytes(16))
                    else:
                        file.unlink()
            await asyncio.sleep(0.5)

    async def _fill_queue(self, fault: Fault) -> None:
        await hostile.fill_queue(self._bus, self._subjects, random.Random(fault.seed), MAX_QUEUED)

    async def _fill_cache(self, fault: Fault) -> None:
        await hostile.fill_stream(self._bus, self._subjects.block, random.Random(fault.seed), 2 * CACHE_BYTES)

    async def _fill_prefill_queue(self, fault: Fault) -> None:
        await hostile.fill_stream(self._bus, self._subjects.prefill, random.Random(fault.seed), PREFILL_FLOOD)

    async def _corrupt_blocks(self, fault: Fault) -> None:
        await hostile.corrupt_blocks(self._bus, self._subjects, random.Random(fault.seed), fault.lasts)

    async def _hostile_messages(self, fault: Fault) -> None:
        await hostile.attack(self._bus, self._subjects, random.Random(fault.seed))

    async def _forge_drafts(self, fault: Fault) -> None:
        await hostile.forge_drafts(self._bus, self._subjects, random.Random(fault.seed), fault.lasts)

    _ways: ClassVar[dict[str, Callable[[Faults, Fault], Awaitable[None]]]] = {
        "cut": _cut,
        "reset": _reset,
        "slow": _slow,
        "cut bulk": _cut_bulk,
        "reset bulk": _reset_bulk,
        "damage host cache": _damage_host_cache,
        "fill queue": _fill_queue,
        "fill cache": _fill_cache,
        "fill prefill queue": _fill_prefill_queue,
        "corrupt blocks": _corrupt_blocks,
        "hostile messages": _hostile_messages,
        "forge drafts": _forge_drafts,
    }
