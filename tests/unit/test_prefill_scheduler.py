"""The prefill scheduler: chunks, order, joining of common prefixes, blocks given back."""

from __future__ import annotations

import pytest

from services.prefill.scheduler import PrefillScheduler, PrefillTask
from shared.cache.blocks import BlockAllocator, OutOfBlocks
from shared.cache.naming import Lineage
from shared.errors import TrineError
from tests.fake_engine import EMPTY, FakeEngine

LINEAGE = Lineage(b"r" * 32, "default")
SIZE = 4


class Rig:
    def __init__(self, *, blocks: int = 64, chunk: int = 16, max_jobs: int = 64) -> None:
        self.engine = FakeEngine(blocks=blocks, block_size=SIZE)
        self.allocator = BlockAllocator(blocks, SIZE)
        self.scheduler = PrefillScheduler(self.allocator, block_size=SIZE, chunk_tokens=chunk, max_jobs=max_jobs)
        self.done: list[PrefillTask] = []

    def submit(self, tokens: list[int]) -> PrefillTask:
        task = PrefillTask(str(len(self.done)), tuple(tokens), LINEAGE, SIZE)
        assert self.scheduler.admit(task)
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
        self.scheduler.check_integrity()
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
        PrefillTask("x", (1, 2, 3), LINEAGE, SIZE)


def waiting(length: int) -> PrefillTask:
    return PrefillTask("w", tuple(range(1000 - length, 1000)), LINEAGE, SIZE)


def test_a_long_job_is_not_overtaken_for_ever_by_short_ones_that_would_fit() -> None:
    rig = Rig(blocks=10)
    running = rig.submit(list(range(16)))
    long, short = waiting(32), waiting(4)
    assert not rig.scheduler.admit(long)
    assert not rig.scheduler.admit(short), "it would fit, but the long one asked first"
    rig.scheduler.end(running)
    assert not rig.scheduler.admit(short)
    assert rig.scheduler.admit(long)
    assert rig.scheduler.admit(short)
    rig.scheduler.check_integrity()


def test_who_gives_up_waiting_holds_up_nobody() -> None:
    rig = Rig(blocks=4)
    rig.submit(list(range(8)))
    long, short = waiting(16), waiting(4)
    assert not rig.scheduler.admit(long)
    assert not rig.scheduler.admit(short)
    rig.scheduler.end(long)
    assert rig.scheduler.admit(short)


def test_what_no_pool_could_hold_is_refused_and_holds_up_nobody() -> None:
    rig = Rig(blocks=4)
    with pytest.raises(OutOfBlocks):
        rig.scheduler.admit(waiting(20))
    assert rig.scheduler.admit(waiting(16))


def test_a_slot_is_held_until_its_step_is_over() -> None:
    rig = Rig(max_jobs=1)
    task = rig.submit(list(range(16)))
    (work,) = rig.scheduler.plan()
    assert work.span.slot == task.slot == 0
    rig.scheduler.end(task)
    rig.scheduler.check_integrity()
    other = waiting(4)
    assert not rig.scheduler.admit(other)
    rig.scheduler.abandon([work])
    assert rig.scheduler.admit(other)
    rig.scheduler.check_integrity()


@pytest.mark.parametrize("chunk", [1, 5, 16, 19])
def test_chunks_are_whole_blocks_within_the_budget(chunk: int) -> None:
    rig = Rig(chunk=chunk)
    for number in range(4):
        rig.submit([number, *range(1, 4 * (number + 2))])
    while works := rig.scheduler.plan():
        lengths = [len(w.span.token_ids) for w in works]
        assert sum(lengths) <= max(chunk, SIZE)
        assert not any(length % SIZE for length in lengths)
        rig.engine.step([w.span for w in works])
        rig.scheduler.complete(works)
        rig.scheduler.check_integrity()
