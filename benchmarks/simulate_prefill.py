"""A simulated prefill worker: the real scheduler, with a machine's time in place of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulate_cache import Cache
from benchmarks.simulate_clock import Clock, Machine
from benchmarks.simulate_costs import Costs
from benchmarks.simulate_world import BLOCK, LINEAGE, Shape
from services.prefill.scheduler import PrefillScheduler, PrefillTask, PrefillWork
from shared.cache.blocks import BlockAllocator

TAKE_S = 0.002
"""From a free place to a job's admission: a pull and a decoded message."""


@dataclass(frozen=True, slots=True)
class Job:
    """Equal jobs have one `name`, that of the last block, and are queued once."""

    name: bytes
    tokens: tuple[int, ...]


class PrefillWorker:
    """`pull` gives a job if there is one; `ended` is told of each."""

    def __init__(
        self,
        number: int,
        machine: int,
        shape: Shape,
        costs: Costs,
        clock: Clock,
        cores: Machine,
        cache: Cache,
        pull: Callable[[], Job | None],
        ended: Callable[[Job], None],
    ) -> None:
        self._number, self._machine = number, machine
        self._shape, self._costs, self._clock, self._cores = shape, costs, clock, cores
        self._cache, self._pull, self._ended = cache, pull, ended
        self._allocator = BlockAllocator(shape.pool_blocks, BLOCK)
        self._scheduler = PrefillScheduler(
            self._allocator, block_size=BLOCK, chunk_tokens=shape.chunk_tokens, max_jobs=shape.max_jobs
        )
        self._jobs: dict[PrefillTask, Job] = {}
        self._waiting: list[PrefillTask] = []
        self._unstored: dict[PrefillTask, int] = {}
        self._stepping = False
        self._started = 0
        self.busy_s = 0.0

    def look(self) -> None:
        """There may be a job, or a place for one."""
        while len(self._jobs) < self._shape.max_jobs and (job := self._pull()) is not None:
            task = PrefillTask(f"{self._number}-{self._started}", job.tokens, LINEAGE, BLOCK)
            self._started += 1
            self._jobs[task] = job
            self._unstored[task] = 0
            self._clock.after(TAKE_S, lambda task=task: self._arrived(task))  # type: ignore[misc]

    def _arrived(self, task: PrefillTask) -> None:
        self._waiting.append(task)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._scheduler.admit(self._waiting[0]):
            self._load(self._waiting.pop(0))

    def _load(self, task: PrefillTask) -> None:
        missing = task.names[task.have :]
        there = self._cache.longest(self._machine, missing)
        if not there:
            self._start(task)
            return

        def filled(near: int, far: int) -> None:
            for index in range(task.have, task.have + near + far):
                self._scheduler.filled(task, index)
            self._start(task)

        self._cache.fetch(self._machine, missing[:there], filled)

    def _start(self, task: PrefillTask) -> None:
        for name in task.names[task.have :]:
            self._cache.flights.setdefault(name, self._number)
        self._store(task, range(task.have))
        self._scheduler.start(task)
        self._step()

    def _store(self, task: PrefillTask, blocks: range) -> None:
        if not blocks:
            return
        self._unstored[task] += 1

        def stored() -> None:
            self._unstored[task] -= 1
            self._finish()

        self._cache.publish(self._machine, [task.names[i] for i in blocks], stored)

    def _step(self) -> None:
        if self._stepping:
            return
        works = self._scheduler.plan()
        self._stepping = bool(works)
        self._finish()
        if not works:
            return
        started = self._clock.now

        def done() -> None:
            self._stepping = False
            self.busy_s += self._clock.now - started
            self._complete(works)

        self._cores.run(self._costs.step_s([w.span for w in works]) + self._costs.host_s, done)

    def _complete(self, works: list[PrefillWork]) -> None:
        for task, blocks in self._scheduler.complete(works):
            self._store(task, blocks)
        self._step()

    def _finish(self) -> None:
        """Jobs whose blocks are all stored."""
        for task in self._scheduler.finished():
            if task in self._jobs and not self._unstored[task]:
                self._scheduler.end(task)
                self._ended(self._jobs.pop(task))
                del self._unstored[task]
        self._admit()
        self.look()
