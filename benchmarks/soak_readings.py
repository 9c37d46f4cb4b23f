"""What is read of a fleet that is idle, and what several such readings say about leaks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.bars import Bars, judged

MB = 1e6
BARS: Bars = {
    "rss_growth": ("<=", 0.03),
    "blocks_kept": ("<=", 0),
    "requests_kept": ("<=", 0),
    "consumers_kept": ("<=", 0),
    "subscriptions_kept": ("<=", 0),
    "connections_kept": ("<=", 0),
    "handles_kept": ("<=", 0),
    "threads_kept": ("<=", 6),
    "requests_failed": ("<=", 0),
}
"""`rss_growth`: of any process, from any of the rounds to any later one, as a share. Those that end with `kept`: how
many more there are after any round than before the first; of handles and threads, in the process that is worst. A
process has pools of up to 6 threads (on 2 cores) that grow when several happen to be needed at once, and stay."""


@dataclass(frozen=True, slots=True)
class Process:
    rss: int
    """Bytes: the least that were seen while the fleet was idle; an allocator takes a moment to give back."""
    handles: int
    threads: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Of an idle fleet. Processes by name, nats-server and the client's own among them."""

    processes: Mapping[str, Process]
    free_blocks: int
    """Of all decode workers: in no request's hands."""
    requests: int
    """Served or waiting, in workers and in the queue."""
    consumers: int
    subscriptions: int
    connections: int
    stored: int
    """Bytes in all streams. Not judged: the cache may be full or not."""


@dataclass(slots=True)
class Done:
    """What became of the requests of one round."""

    ended: dict[str, int] = field(default_factory=dict)
    """By kind of request: those that ended as that kind should."""
    failed: list[str] = field(default_factory=list)
    """What went wrong with the others."""
    seconds: float = 0.0
    blocks_in_use: int = 0
    """The most that were seen."""

    def count(self, kind: str) -> None:
        self.ended[kind] = self.ended.get(kind, 0) + 1


def slope(values: Sequence[float]) -> float:
    """Of the least-squares line through values at 0, 1, 2 …"""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((i - middle) ** 2 for i in range(len(values)))
    return sum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread


def growth(values: Sequence[float]) -> float:
    """From any of them to any later one, as a share; negative if all that follow are smaller."""
    return max(later / value - 1 for i, value in enumerate(values) for later in values[i + 1 :])


def process_row(readings: Sequence[Process]) -> dict[str, float]:
    """One process: before the first round, then after each."""
    rss = [reading.rss / MB for reading in readings]
    megabytes = {"rss_mb_before": rss[0], **{f"rss_mb_after_{i}": value for i, value in enumerate(rss[1:], 1)}}
    return {
        **megabytes,
        "rss_growth": growth(rss[1:]),
        "rss_slope_mb": slope(rss[1:]),
        "handles_before": readings[0].handles,
        "handles_kept": max(r.handles for r in readings[1:]) - readings[0].handles,
        "threads_before": readings[0].threads,
        "threads_kept": max(r.threads for r in readings[1:]) - readings[0].threads,
    }


def judge(readings: Sequence[Reading], rounds: Sequence[Done]) -> dict[str, Any]:
    """`readings`: before the first round, then one after each of `rounds`."""
    before, after = readings[0], readings[1:]
    processes = {name: process_row([r.processes[name] for r in readings]) for name in before.processes}
    result: dict[str, Any] = {
        "rss_growth": max(row["rss_growth"] for row in processes.values()),
        "blocks_kept": before.free_blocks - min(r.free_blocks for r in after),
        "requests_kept": max(r.requests for r in after),
        "consumers_kept": max(r.consumers for r in after) - before.consumers,
        "subscriptions_kept": max(r.subscriptions for r in after) - before.subscriptions,
        "connections_kept": max(r.connections for r in after) - before.connections,
        "handles_kept": max(row["handles_kept"] for row in processes.values()),
        "threads_kept": max(row["threads_kept"] for row in processes.values()),
        "requests_failed": sum(len(done.failed) for done in rounds),
    }
    loads = {
        f"round {i}": {
            "requests": sum(done.ended.values()),
            "seconds": done.seconds,
            "most_blocks_in_use": done.blocks_in_use,
            "consumers": reading.consumers,
            "subscriptions": reading.subscriptions,
            "connections": reading.connections,
            "stored_mb": reading.stored / MB,
        }
        for i, (done, reading) in enumerate(zip(rounds, after, strict=True), 1)
    }
    return {
        "rows": {**processes, **loads},
        "kinds": [done.ended for done in rounds],
        "failures": [why for done in rounds for why in done.failed][:20],
        "bars": judged(result, BARS),
    }
