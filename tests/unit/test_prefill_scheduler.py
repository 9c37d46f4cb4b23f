"""The prefill scheduler: chunks, order, joining of common prefixes, blocks given back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.prefill.scheduler import PrefillScheduler, PrefillTask
from shared.cache.blocks import BlockAllocator, OutOfBlocks
from shared.errors import TrineError
from tests.fake_engine import EMPTY, FakeEngine

ROOT = b"r" * 32
SIZE = 4


class Rig:
    def __init__(self, *, blocks: int = 64, chunk: int = 16) -> None:
        self.engine = FakeEngine(blocks=blocks, block_size=SIZE)
        self.allocator = BlockAllocator(blocks, SIZE)
        self.scheduler = PrefillScheduler(self.allocator, block_size=SIZE, chunk_tokens=chunk)
        self.done: list[PrefillTask] = []

    def submit(self, tokens: list[int]) -> PrefillTask:
        task = PrefillTask(str(len(self.done)), tuple(tokens), ROOT, SIZE)
        self.scheduler.admit(task)
        self.scheduler.start(task)
        return task

    def step(self) -> bool:
        works = self.scheduler.plan()
        for task in self.scheduler.finished():
            self.check(task)
            self.done.append(task)
            self.scheduler.end(task)
        if not works:
            return False
        self.engine.step([w.span for w in works])
        self.scheduler.complete(works)
        return True

    def run(self) -> None:
        for _ in range(2000):
            if not self.step() and not self.scheduler.running:
                return
        raise AssertionError("no progress")

    def check(self, task: PrefillTask) -> None:
        held = [
            int.from_bytes(self.engine.read_block(b)[i : i + 4], "little") for b in task.table for i in range(0, 16, 4)
        ]
        assert held == list(task.tokens)
        assert EMPTY not in held


def test_a_job_is_computed_in_chunks() -> None:
    rig = Rig(chunk=8)
    task = rig.submit(list(range(20)))
    rig.run()
    assert rig.done == [task]
    assert rig.engine.steps == 3
    assert rig.allocator.in_use == 0


def test_the_shortest_goes_first_and_the_longest_does_not_starve() -> None:
    rig = Rig(chunk=4, blocks=400)
    long = rig.submit(list(range(40)))
    for turn in range(60):
        rig.submit([500 + turn, 1, 2, 3])
        rig.step()
        if long in rig.done:
            break
    assert long in rig.done
    assert rig.done[0] is not long


def test_jobs_with_a_common_prefix_compute_it_once() -> None:
    rig = Rig(chunk=16)
    prefix = list(range(32))
    rig.submit([*prefix, 1, 1, 1, 1])
    rig.submit([*prefix, 2, 2, 2, 2])
    rig.submit(prefix)
    rig.run()
    assert len(rig.done) == 3
    assert rig.engine.tokens_computed == 32 + 4 + 4


def test_an_ended_job_frees_its_blocks_only_after_its_step() -> None:
    rig = Rig(blocks=4)
    task = rig.submit(list(range(16)))
    works = rig.scheduler.plan()
    rig.scheduler.end(task)
    with pytest.raises(OutOfBlocks):
        rig.allocator.allocate(1)
    rig.engine.step([w.span for w in works])
    rig.scheduler.complete(works)
    assert len(rig.allocator.allocate(4)) == 4


def test_a_joined_job_takes_over_when_its_leader_ends() -> None:
    rig = Rig(chunk=8)
    leader = rig.submit(list(range(32)))
    follower = rig.submit(list(range(32)))
    rig.step()
    rig.scheduler.end(leader)
    rig.run()
    assert rig.done == [follower]
    assert rig.engine.tokens_computed == 32


def test_unfull_blocks_are_refused() -> None:
    with pytest.raises(TrineError):
        PrefillTask("x", (1, 2, 3), ROOT, SIZE)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(12, 60), chunk=st.integers(1, 40))
def test_random_jobs_and_cancels(seed: int, blocks: int, chunk: int) -> None:
    rng = random.Random(seed)
    rig = Rig(blocks=blocks, chunk=chunk)
    base = [rng.randrange(1000) for _ in range(40)]
    live: list[PrefillTask] = []
    for _ in range(15):
        cut = rng.randrange(0, 6) * SIZE
        tokens = base[:cut] + [rng.randrange(1000) for _ in range(rng.randrange(1, 5) * SIZE)]
        try:
            live.append(rig.submit(tokens))
        except OutOfBlocks:
            rig.run()
        for _ in range(rng.randrange(3)):
            rig.step()
        if rng.random() < 0.2 and live:
            rig.scheduler.end(live.pop(rng.randrange(len(live))))
        rig.allocator.check_integrity()
    rig.run()
    assert rig.allocator.in_use == 0
