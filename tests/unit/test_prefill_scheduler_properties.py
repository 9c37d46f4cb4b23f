"""The prefill scheduler under random loads: every job that is not cancelled ends with the right blocks, none leaks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.prefill.scheduler import PrefillScheduler, PrefillTask, PrefillWork
from shared.cache.blocks import BlockAllocator, OutOfBlocks
from shared.cache.naming import Lineage
from tests.sealed_engine import SealedEngine

LINEAGE = Lineage(b"r" * 32, "default")
FAMILIES = [[(7 * n + 13 * family) % 1000 for n in range(64)] for family in range(2)]


@dataclass(frozen=True)
class Shape:
    blocks: int
    block_size: int
    max_jobs: int
    chunk_tokens: int


class World:
    """A prefill worker without messages or clock. Every operation is followed by a check of everything."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.engine = SealedEngine(blocks=shape.blocks, block_size=shape.block_size, slots=shape.max_jobs, lookahead=0)
        self.allocator = BlockAllocator(shape.blocks, shape.block_size)
        self.scheduler = PrefillScheduler(
            self.allocator,
            block_size=shape.block_size,
            chunk_tokens=shape.chunk_tokens,
            max_jobs=shape.max_jobs,
        )
        self.tasks: list[PrefillTask] = []
        self.waiting: list[PrefillTask] = []  # as they asked
        self.loading: list[PrefillTask] = []
        self.done: set[PrefillTask] = set()
        self.cancelled: set[PrefillTask] = set()
        self.pending: list[PrefillWork] = []
        self.store: dict[bytes, tuple[int, ...]] = {}
        self.publishing: list[tuple[bytes, int]] = []

    # Operations: each takes a number that decides what it does

    def arrive(self, n: int) -> None:
        rng, size = random.Random(n), self.shape.block_size
        tail = [rng.randrange(1000) for _ in range(size * rng.randrange(5) if n % 4 else 0)]
        tokens = FAMILIES[n % 2][: rng.randrange(1, 10) * size] + tail
        task = PrefillTask(str(len(self.tasks)), tuple(tokens), LINEAGE, size)
        if len(task.names) <= self.shape.blocks:
            self.tasks.append(task)
            self.waiting.append(task)
            self._ask(task)
        else:
            with pytest.raises(OutOfBlocks):
                self.scheduler.admit(task)

    def ask(self, n: int) -> None:
        if self.waiting:
            self._ask(self.waiting[n % len(self.waiting)])

    def _ask(self, task: PrefillTask) -> None:
        if self.scheduler.admit(task):
            assert task is self.waiting[0], "one was overtaken"
            self.waiting.remove(task)
            self.loading.append(task)

    def load(self, n: int) -> None:
        """One block for one that is loading; or it misses, and computes the rest."""
        if not self.loading:
            return
        task = self.loading[n % len(self.loading)]
        name = (*task.names, b"")[task.have]
        if task.ended:
            self.loading.remove(task)
        elif name in self.store and n % 8:
            self.engine.load(task.table[task.have], self.store[name])
            self.scheduler.filled(task, task.have)
        else:
            self.loading.remove(task)
            self.scheduler.start(task)

    def cancel(self, n: int) -> None:
        if live := [t for t in self.tasks if not t.ended]:
            task = live[n % len(live)]
            self.cancelled.add(task)
            self.scheduler.end(task)
            if task in self.waiting:
                self.waiting.remove(task)

    def publish(self, n: int) -> None:
        if self.publishing:
            name, block = self.publishing.pop(0)
            self.store[name] = tuple(self.engine.block(block))
            self.allocator.release([block])

    def plan(self, n: int) -> None:
        if self.pending:
            return
        self.pending = self.scheduler.plan()
        assert sum(len(w.span.token_ids) for w in self.pending) <= max(self.shape.chunk_tokens, self.shape.block_size)
        for task in self.scheduler.finished():
            held = [token for block in task.table for token in self.engine.block(block)]
            assert held == list(task.tokens)
            self.done.add(task)
            self.scheduler.end(task)
        assert self.pending or not self.scheduler.running, "jobs are running and none is computed"

    def finish(self, n: int) -> None:
        """The forward pass ends, well or not; after a failed one its jobs are given back, or go on."""
        works, self.pending = self.pending, []
        if n % 8:
            self.engine.step([w.span for w in works])
            for task, filled in self.scheduler.complete(works):
                for index in filled:
                    names = [task.names[index]]
                    self.publishing += zip(names, self.allocator.match(names), strict=True)
            return
        self.engine.fail([w.span for w in works])
        self.scheduler.abandon(works)
        for work in works:
            if n % 16 and not work.task.ended:
                self.cancelled.add(work.task)
                self.scheduler.end(work.task)

    # Driving

    def do(self, operation: Callable[[World, int], None], n: int) -> None:
        operation(self, n)
        self.scheduler.check_integrity([[block] for _, block in self.publishing])

    def drain(self) -> None:
        serial = sum(len(t.names) + 2 for t in self.tasks) + len(self.tasks) + 2
        for turn in range(4 * serial):
            if all(t.ended for t in self.tasks):
                break
            for operation, n in ((World.ask, 0), (World.load, turn), (World.plan, 0), (World.finish, 1)):
                self.do(operation, n)
            self.do(World.publish, 0)
        assert all(t.ended for t in self.tasks), "no progress"
        self.do(World.finish, 1)
        while self.publishing:
            self.do(World.publish, 0)

    def check_end(self) -> None:
        assert self.allocator.in_use == 0
        assert self.done | self.cancelled == set(self.tasks)


OPERATIONS = [World.arrive, World.ask, World.load, World.cancel, World.publish, World.plan, World.finish]
OFTEN = [*OPERATIONS, *[World.arrive, World.ask, World.load, World.plan, World.finish] * 3]
SHAPES = st.builds(
    Shape,
    blocks=st.integers(3, 60),
    block_size=st.integers(1, 4),
    max_jobs=st.integers(1, 6),
    chunk_tokens=st.integers(1, 40),
)
SCRIPTS = st.lists(st.tuples(st.sampled_from(OFTEN), st.integers(0, 2**16)), min_size=20, max_size=120)


def play(shape: Shape, script: list[tuple[Callable[[World, int], None], int]]) -> World:
    world = World(shape)
    for operation, n in script:
        world.do(operation, n)
    world.drain()
    world.check_end()
    return world


COMMON = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@settings(COMMON, max_examples=100)
@given(shape=SHAPES, script=SCRIPTS)
def test_any_jobs_end_with_the_right_blocks(
    shape: Shape, script: list[tuple[Callable[[World, int], None], int]]
) -> None:
    play(shape, script)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(COMMON, max_examples=1000)
@given(shape=SHAPES, script=SCRIPTS)
def test_any_jobs_end_with_the_right_blocks_thousands(
    shape: Shape, script: list[tuple[Callable[[World, int], None], int]]
) -> None:
    play(shape, script)
