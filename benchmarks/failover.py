"""How long a NATS cluster's loss of a leader holds up requests.

    python -m benchmarks.failover --json

Three nats-servers with the configuration of deploy/cluster, workers with an engine that costs nothing, and a steady
load, all on this machine. The server that leads a stream is killed as a crash would, each stream's in turn, and started
again. A request asked at that moment tells how long it takes until Trine answers again. Every answer is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import count, pairwise
from typing import Any

import structlog

from benchmarks.cluster import Cluster, leaders
from shared.bus.base import Bus
from shared.bus.nats import NatsBus
from shared.config import Settings
from shared.streams import decode_streams
from shared.subjects import Subjects
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL
from tests.nats_fleet import NatsFleet
from trine.client import Client

SUBJECTS = Subjects(MODEL)
REPLICAS = 3
STREAMS = (*(spec.name for spec in decode_streams(SUBJECTS, Settings())), SUBJECTS.block_stream)
LANES = 6
PROMPT = 24
TOKENS = 12
ANSWER_S = 60.0
STEP_S = 0.005
WORKERS: dict[str, Any] = {"nats_replicas": REPLICAS, "ack_wait_s": 2.0, "beat_s": 0.2, "peer_timeout_s": 1.5}


@dataclass
class Load:
    """Asks the fleet without pause in several lanes, and checks what comes."""

    client: Client
    finished: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Ids of all requests."""
    _numbers: Any = field(default_factory=count)

    async def ask(self) -> float:
        """One request; the seconds it took."""
        number = next(self._numbers)
        prompt = [number % 997, number // 997, *range(PROMPT)]
        started, request_id = time.monotonic(), f"load-{number}"
        self.asked.append(request_id)
        try:
            answer = await self.client.generate(
                id=request_id, token_ids=prompt, max_tokens=TOKENS, deadline_ms=round(ANSWER_S * 1e3)
            )
        except Exception as error:
            self.wrong.append(f"{request_id}: {type(error).__name__}: {error}")
        else:
            if list(answer.token_ids) != completion(prompt, TOKENS):
                self.wrong.append(f"{request_id}: {answer.token_ids}")
        self.finished.append(time.monotonic())
        return self.finished[-1] - started

    async def lane(self, stop: asyncio.Event) -> None:
        while not (stop.is_set() or self.wrong):
            await self.ask()

    def pause_after(self, moment: float) -> float:
        """The longest time without a finished request, from `moment` on until the last that finished."""
        times = [moment, *(t for t in self.finished if t > moment)]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def next_after(self, moment: float) -> float:
        """From `moment` to the next finished request."""
        return min((t for t in self.finished if t > moment), default=float("inf")) - moment


@asynccontextmanager
async def under_load(cluster: Cluster) -> AsyncIterator[tuple[NatsFleet, Load, Bus]]:
    """A fleet at work on the cluster; its load ends, with all that was asked answered, when the block does."""
    async with NatsFleet(cluster.url) as fleet:
        for name in ("decode-1", "decode-2"):
            await fleet.decode(name, FakeEngine(blocks=256, step_s=STEP_S), **WORKERS)
        await fleet.prefill(engine=FakeEngine(blocks=256, step_s=STEP_S), **WORKERS)
        bus = await NatsBus.connect(cluster.url, name="failover", wait=10.0)
        stop = asyncio.Event()
        async with Client(cluster.url, MODEL) as client, asyncio.TaskGroup() as group:
            load = Load(client)
            for _ in range(LANES):
                group.create_task(load.lane(stop))
            try:
                yield fleet, load, bus
            finally:
                stop.set()
        await bus.close()


@dataclass(frozen=True, slots=True)
class Kill:
    """Of the server that led `leads`. Seconds: until a request was answered that was asked at once, until any request
    was, and the longest time without an answer.
    """

    leads: list[str]
    recovery_s: float
    next_finished_s: float
    pause_s: float


async def kill_leader(cluster: Cluster, load: Load, bus: Bus, stream: str, settle_s: float = 1.0) -> Kill:
    """Kill the server that leads `stream`, start it again once a request has been answered, wait until it is back."""
    led = await leaders(bus, STREAMS)
    server = cluster.servers[led[stream]]
    server.kill()
    moment = time.monotonic()
    recovery = await load.ask()
    server.start()
    await cluster.steady()
    await asyncio.sleep(settle_s)
    leads = [name for name, leader in led.items() if leader == server.name]
    return Kill(leads, recovery, load.next_after(moment), load.pause_after(moment))


def report(kills: Sequence[Kill], load: Load) -> dict[str, Any]:
    """Figures in seconds."""
    recovery = [kill.recovery_s for kill in kills]
    return {
        "kills": [asdict(kill) for kill in kills],
        "recovery_median_s": round(statistics.median(recovery), 2),
        "recovery_max_s": round(max(recovery), 2),
        "longest_pause_s": round(max(kill.pause_s for kill in kills), 2),
        "requests": len(load.finished),
        "wrong": load.wrong,
    }


async def measure(kills: int) -> dict[str, Any]:
    done: list[Kill] = []
    async with Cluster() as cluster, under_load(cluster) as (_, load, bus):
        await asyncio.sleep(2.0)
        for number in range(kills):
            done.append(await kill_leader(cluster, load, bus, STREAMS[number % len(STREAMS)]))
    return report(done, load)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=len(STREAMS), help="one for each stream unless given")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    given = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    found = asyncio.run(measure(given.kills))
    if given.json:
        print(json.dumps(found))
        return
    for kill in found["kills"]:
        print(f"{kill['recovery_s']:6.2f} s  {', '.join(kill['leads'])}")
    print(f"median {found['recovery_median_s']} s, max {found['recovery_max_s']} s, {found['requests']} requests")
    print(f"wrong: {len(found['wrong'])}")


if __name__ == "__main__":
    main()
