"""How fast KV blocks move: the bulk connection next to the client library, the host tier, control messages meanwhile.

`python -m benchmarks.transfer [--json]`. One nats-server with JetStream in memory, started for this. Contestants take
turns, so that a busy neighbour slows all of them; ratios are medians over the turns of what was measured side by side,
with the smallest and the largest. Rates are of payload bytes; CPU is the client process's own, all threads, the
kernel's part included. The client library runs as the workers run it, with uvloop. About a minute.

"verified" are blocks as a worker has them: framed, in the pool's memory, and their digest checked (SHA-256 from the
wire, the host tier's own checksum from shared memory). Both tiers are measured at the call that blocks, and each at its
best. The stream is asked for all blocks at once and each is checked as it arrives, which is no slower than checking
them in a second thread, as workers do. The host tier is read in pages of 16 blocks, as workers fetch, which it copies
with two threads. The places are memory that has been written to before, as the pool's is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bars import judged
from shared.bus.base import Incoming, StreamSpec
from shared.bus.block_link import Item, Reader
from shared.bus.bulk_stream import StreamLink
from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.cache import frames, naming
from shared.cache.fetch import PAGE
from shared.cache.frames import BlockMeta
from shared.cache.host import HostBlocks
from shared.messages import Identity

BARS: dict[str, tuple[str, float]] = {
    "get_over_nats_py_256k": (">=", 2.0),
    "get_over_nats_py_1m": (">=", 2.0),
    "get_cpu_over_nats_py_256k": ("<=", 0.5),
    "get_cpu_over_nats_py_1m": ("<=", 0.5),
    "host_get_over_nats_get_256k": (">=", 5.0),
    "host_get_over_nats_get_1m": (">=", 5.0),
    "control_p99_ms": ("<=", 25.0),
}
# The last: a block of SmolLM2-135M, 16 tokens in fp32.
SIZES = {"256k": 256 << 10, "1m": 1 << 20, "737280": 737_280}
TURN_BYTES = 128 << 20
TURNS = 7
CONTROL_S = 5.0
CONTROL_PAUSE_S = 0.002
STREAM = StreamSpec("BENCH", ("bench.b.>",), max_bytes=768 << 20, max_msgs_per_subject=1)
TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Cost:
    rate: float  # MB/s
    cpu: float  # seconds per GB


@contextmanager
def measured(nbytes: int, into: list[Cost]) -> Iterator[None]:
    cpu, clock = time.process_time(), time.perf_counter()
    yield
    into.append(Cost(nbytes / (time.perf_counter() - clock) / 1e6, (time.process_time() - cpu) / (nbytes / 1e9)))


def deadline() -> float:
    return time.monotonic() + TIMEOUT


class Size:
    """Blocks of one size: who moves them takes turns. Rows are named `<what> <by whom>`."""

    def __init__(self, nbytes: int, bus: NatsBus, link: StreamLink, host: HostBlocks, identity: Identity) -> None:
        self._bus, self._link, self._host, self._identity = bus, link, host, identity
        self._count = TURN_BYTES // nbytes
        self._nbytes = nbytes * self._count
        self._payload = memoryview(os.urandom(nbytes))
        self._places = [memoryview(bytearray(nbytes)) for _ in range(PAGE)]
        self.costs: dict[str, list[Cost]] = {}

    def _measured(self, name: str) -> Any:
        return measured(self._nbytes, self.costs.setdefault(name, []))

    async def turn(self, number: int) -> None:
        by_library, in_bulk = ([f"bench.b.{who}{number}.{i}" for i in range(self._count)] for who in "lb")
        works: list[Callable[[], Awaitable[None]]] = [
            lambda: self._by_library(by_library),
            lambda: asyncio.to_thread(self._in_bulk, in_bulk),
            lambda: asyncio.to_thread(self._verified, number),
        ]
        for work in works if number % 2 else reversed(works):
            await work()

    async def _by_library(self, subjects: Sequence[str]) -> None:
        window = asyncio.Semaphore(16)

        async def put(subject: str) -> None:
            async with window:
                # In two parts, as frames are: the library joins them.
                await self._bus.append(subject, (b"", self._payload), expect_last=0, timeout=TIMEOUT)

        with self._measured("put nats-py"):
            await asyncio.gather(*map(put, subjects))
        with self._measured("get nats-py"):
            found = await self._bus.get_many(STREAM.name, subjects, timeout=TIMEOUT)
        require(all(found[subject].data == self._payload for subject in subjects))

    def _in_bulk(self, subjects: Sequence[str]) -> None:
        with self._measured("put bulk"):
            answers = self._link.put([Item(subject, (self._payload,)) for subject in subjects], deadline())
        require(all(isinstance(answer, int) for answer in answers))
        taken = 0

        def receive(subject: str, seq: int, size: int, reader: Reader) -> None:
            nonlocal taken
            reader.into(self._places[taken % PAGE])
            taken += 1

        with self._measured("get bulk"):
            self._link.get(STREAM.name, subjects, receive, deadline())
        require(taken == len(subjects) and all(place == self._payload for place in self._places))

    def _verified(self, turn: int) -> None:
        root = naming.root(self._identity, f"turn {turn}")
        tokens = [token for i in range(self._count) for token in [i] * self._identity.block_size]
        metas = frames.metas(root, tokens, self._identity.block_size)
        with self._measured("put host tier"):
            require(all(self._host.put(meta, self._payload) for meta in metas))
        with self._measured("get host tier"):
            for start in range(0, len(metas), PAGE):
                page = metas[start : start + PAGE]
                require(None not in self._host.get(list(zip(page, self._places, strict=False))))
        require(all(place == self._payload for place in self._places))
        self._host.drop()
        with self._measured("put bulk, framed"):
            answers = self._link.put([self._framed(meta) for meta in metas], deadline())
        require(all(isinstance(answer, int) for answer in answers))
        with self._measured("get bulk, verified"):
            self._get_verified(metas)

    def _framed(self, meta: BlockMeta) -> Item:
        (frame,) = frames.encode(meta, self._payload, self._identity, self._identity.block_bytes)
        return Item(f"bench.b.{meta.name.hex()}", frame)

    def _get_verified(self, metas: Sequence[BlockMeta]) -> None:
        by_subject = {f"bench.b.{meta.name.hex()}": meta for meta in metas}
        verified = 0

        def receive(subject: str, seq: int, size: int, reader: Reader) -> None:
            nonlocal verified
            place = self._places[verified % PAGE]
            head = reader.exactly(size - place.nbytes)
            reader.into(place)
            frame = frames.decode_apart(head, place)
            frames.verify(frame, by_subject[subject], self._identity, 0, place.nbytes)
            verified += 1

        self._link.get(STREAM.name, list(by_subject), receive, deadline())
        require(verified == len(metas))


def require(holds: bool) -> None:
    """A benchmark of wrong bytes is worth nothing."""
    if not holds:
        raise SystemExit("blocks are missing or not what was put")


async def control(url: str, bulk: Callable[[threading.Event], None] | None) -> dict[str, float]:
    """Round trips between two connections of this process, in ms, while `bulk` runs in a thread until it is told."""
    asking, answering = [await NatsBus.connect(url, name="control", wait=TIMEOUT) for _ in range(2)]

    async def answer(message: Incoming) -> None:
        await answering.publish(message.reply, message.data)

    await answering.subscribe("bench.echo", answer)
    enough = threading.Event()
    running = asyncio.create_task(asyncio.to_thread(bulk, enough)) if bulk else None
    trips: list[float] = []
    until = time.perf_counter() + CONTROL_S
    while (start := time.perf_counter()) < until:
        await asking.request("bench.echo", b"x" * 100, TIMEOUT)
        trips.append((time.perf_counter() - start) * 1e3)
        await asyncio.sleep(CONTROL_PAUSE_S)
    enough.set()
    if running is not None:
        await running
    await asking.close()
    await answering.close()
    return {"p50": statistics.median(trips), "p99": statistics.quantiles(trips, n=100)[98], "trips": len(trips)}


def transfer(link: StreamLink, enough: threading.Event) -> None:
    """Put and get 1 MB blocks again and again."""
    payload = memoryview(os.urandom(SIZES["1m"]))
    place = memoryview(bytearray(len(payload)))
    turn = 0
    while not enough.is_set():
        subjects = [f"bench.b.c{turn}.{i}" for i in range(32)]
        answers = link.put([Item(subject, (payload,)) for subject in subjects], deadline())
        require(all(isinstance(answer, int) for answer in answers))
        link.get(STREAM.name, subjects, lambda subject, seq, size, reader: reader.into(place), deadline())
        turn += 1


@contextmanager
def shared_memory() -> Iterator[Path]:
    system = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=system if system.is_dir() else None) as folder:
        yield Path(folder) / "blocks"


async def measure(url: str, memory: Path) -> dict[str, Any]:
    bus = await NatsBus.connect(url, name="library", wait=TIMEOUT)
    link = StreamLink(url, "bulk")
    result: dict[str, Any] = {"rows": {}, "spread": {}}
    for name, nbytes in SIZES.items():
        await bus.ensure_stream(STREAM)
        identity = Identity(fingerprint="f" * 64, codec="none", block_size=16, block_bytes=nbytes)
        host = HostBlocks(memory, identity, 4 * TURN_BYTES)
        if not host.open():
            raise SystemExit(f"no shared memory for the host tier: {host.trouble}")
        size = Size(nbytes, bus, link, host, identity)
        for number in range(TURNS):
            await emptied(bus)  # subjects repeat between sizes
            await size.turn(number)
        host.close()
        summarise(result, name, size.costs)
    await emptied(bus)
    result["control"] = {
        "quiet": await control(url, None),
        "bulk transfer": await control(url, lambda enough: transfer(link, enough)),
    }
    result["control_p99_ms"] = result["control"]["bulk transfer"]["p99"]
    link.close()
    await bus.close()
    return result


async def emptied(bus: NatsBus) -> None:
    await bus.request(f"$JS.API.STREAM.PURGE.{STREAM.name}", b"", TIMEOUT)


def summarise(result: dict[str, Any], size: str, costs: dict[str, list[Cost]]) -> None:
    for row, turns in costs.items():
        rate, cpu = (statistics.median(values) for values in ([c.rate for c in turns], [c.cpu for c in turns]))
        result["rows"][f"{row}, {size}"] = {"MB/s": rate, "CPU-s/GB": cpu}
    pairs = {
        "put_over_nats_py": ("put bulk", "put nats-py", "rate"),
        "get_over_nats_py": ("get bulk", "get nats-py", "rate"),
        "put_cpu_over_nats_py": ("put bulk", "put nats-py", "cpu"),
        "get_cpu_over_nats_py": ("get bulk", "get nats-py", "cpu"),
        "host_get_over_nats_get": ("get host tier", "get bulk, verified", "rate"),
        "host_get_over_bare_nats_get": ("get host tier", "get bulk", "rate"),
        "host_get_over_bare_nats_py": ("get host tier", "get nats-py", "rate"),
    }
    for name, (one, other, what) in pairs.items():
        ratios = [getattr(a, what) / getattr(b, what) for a, b in zip(costs[one], costs[other], strict=True)]
        result[f"{name}_{size}"] = statistics.median(ratios)
        result["spread"][f"{name}_{size}"] = (min(ratios), max(ratios))


def table(result: dict[str, Any]) -> str:
    lines = [f"load average {result['load_average']:.1f}", ""]
    for row, values in result["rows"].items():
        lines.append(f"{row:<34}{values['MB/s']:>8.0f} MB/s{values['CPU-s/GB']:>8.2f} CPU-s/GB")
    for name, values in result["control"].items():
        lines.append(f"control, {name:<25}{values['p50']:>8.2f} ms p50{values['p99']:>8.2f} ms p99")
    lines.append("")
    for name in (*result["spread"], "control_p99_ms"):
        low, high = result["spread"].get(name, (result[name], result[name]))
        bar = result["bars"].get(name)
        verdict = "" if bar is None else f"  bar {bar['bar']}" + ("" if bar["passed"] else "  MISSED")
        lines.append(f"{name:<36}{result[name]:>8.2f}  ({low:.2f} .. {high:.2f}){verdict}")
    return "\n".join(lines)


def run() -> dict[str, Any]:
    loops = asyncio.new_event_loop
    if sys.platform != "win32":
        import uvloop

        loops = uvloop.new_event_loop
    with EmbeddedNats() as server, shared_memory() as memory, asyncio.Runner(loop_factory=loops) as runner:
        result = runner.run(measure(server.url, memory))
    result["load_average"] = os.getloadavg()[0]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    result = run()
    result["bars"] = judged(result, BARS)
    print(json.dumps(result) if arguments.json else table(result))
    sys.exit(0 if all(bar["passed"] for bar in result["bars"].values()) else 1)


if __name__ == "__main__":
    main()
