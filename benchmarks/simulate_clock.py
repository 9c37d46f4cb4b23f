"""A virtual clock, and what takes time on it: machines with few cores, a bus with a rate. Pure.

Seconds are the simulation's; nothing waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

Call = Callable[[], None]


class Clock:
    """Runs calls in order of time; those of one moment in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Call]] = []
        self._number = count()

    def after(self, seconds: float, call: Call) -> None:
        heapq.heappush(self._calls, (self.now + max(seconds, 0.0), next(self._number), call))

    def run(self, done: Callable[[], bool], until: float) -> None:
        """Until `done`, nothing is left, or the time is up."""
        while self._calls and not done():
            at, _, call = self._calls[0]
            if at > until:
                return
            heapq.heappop(self._calls)
            self.now = at
            call()


@dataclass(slots=True)
class _Task:
    left: float
    """Seconds, with the machine to itself."""
    done: Call


class Machine:
    """Cores that tasks share: each has one at most, and slows the others as they share the way to memory."""

    def __init__(self, clock: Clock, cores: int, contention: float) -> None:
        self._clock = clock
        self._cores = cores
        self._contention = contention
        self._tasks: list[_Task] = []
        self._seen = 0.0
        self._version = 0

    def run(self, seconds: float, done: Call) -> None:
        self._progress()
        self._tasks.append(_Task(max(seconds, 1e-9), done))
        self._next()

    def _pace(self) -> float:
        """Of each task, with as many as there are now."""
        busy = len(self._tasks)
        together = min(busy, self._cores)
        return min(1.0, self._cores / busy) / (1.0 + self._contention * (together - 1))

    def _progress(self) -> None:
        if self._tasks:
            past = (self._clock.now - self._seen) * self._pace()
            for task in self._tasks:
                task.left -= past
        self._seen = self._clock.now

    def _next(self) -> None:
        """Come back when the first of them is over, unless something changes before."""
        self._version += 1
        if not self._tasks:
            return
        version = self._version
        first = min(task.left for task in self._tasks) / self._pace()
        self._clock.after(first, lambda: self._over(version))

    def _over(self, version: int) -> None:
        if version != self._version:
            return
        self._progress()
        over = [task for task in self._tasks if task.left <= 1e-12]
        self._tasks = [task for task in self._tasks if task.left > 1e-12]
        self._next()
        for task in over:
            task.done()


@dataclass(frozen=True, slots=True)
class BusRates:
    """Of one NATS server: measured with nats-server 2.15 on two cores, bytes of blocks in and out together."""

    bytes_per_s: float = 690e6
    link_bytes_per_s: float = 500e6
    """Of one worker's connection."""
    message_s: float = 1 / 90_000
    """Of the server, for each message."""
    latency_s: float = 0.0004
    memory_bytes_per_s: float = 4.4e9
    """Between workers of one machine, through shared memory (`benchmarks.transfer`)."""


@dataclass(slots=True)
class Bus:
    """A server that takes one message after another; whoever sends too much makes all wait."""

    clock: Clock
    rates: BusRates = field(default_factory=BusRates)
    busy_s: float = 0.0
    bytes: float = 0.0
    messages: int = 0
    _free: float = 0.0

    def send(self, bytes_: float, messages: int, done: Call) -> None:
        """`done` when it has arrived."""
        self.note(bytes_, messages)
        link = bytes_ / self.rates.link_bytes_per_s
        self.clock.after(max(self._free - self.clock.now, link) + self.rates.latency_s, done)

    def note(self, bytes_: float, messages: int) -> None:
        """For messages whose arrival nobody waits for."""
        took = bytes_ / self.rates.bytes_per_s + messages * self.rates.message_s
        self._free = max(self._free, self.clock.now) + took
        self.busy_s += took
        self.bytes += bytes_
        self.messages += messages
