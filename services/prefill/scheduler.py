"""Which prefill jobs share the next forward pass, and how many tokens of each. Pure: no I/O, no clock, no torch.

Shortest remaining first, so that short prompts do not wait behind long ones; every step that a job is passed over
makes it count as shorter, so that long ones do not starve. Jobs with a common prefix are joined: while one computes
a block, the others wait for it and take it from the pool.

A job has all its blocks from its admission on and never needs more, so that every job that is admitted can end.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from shared.cache.blocks import BlockAllocator, OutOfBlocks
from shared.cache.frames import BlockMeta
from shared.cache.naming import Lineage
from shared.engine.span import Span
from shared.errors import TrineError

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class PrefillTask:
    """The blocks of one job. `computed` tokens, whole blocks, have their KV in `table`; `ended` jobs hold no blocks."""

    id: str
    tokens: tuple[int, ...]
    lineage: Lineage
    block_size: int
    names: list[bytes] = field(init=False)
    table: list[int] = field(default_factory=list)
    slot: int = NO_SLOT
    """Its own among the jobs that hold blocks, the same for as long as it holds them."""
    computed: int = 0
    passed_over: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.names = []
        self.lineage.extend(self.names, len(self.tokens) // self.block_size, self.tokens, self.block_size)
        if not self.names or len(self.tokens) % self.block_size:
            raise TrineError("a prefill job is a whole number of blocks")

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def have(self) -> int:
        """Full blocks computed or loaded."""
        return self.computed // self.block_size

    def meta(self, index: int) -> BlockMeta:
        tokens = self.tokens[index * self.block_size : (index + 1) * self.block_size]
        parent = self.lineage.parent(index, self.names)
        return BlockMeta(self.names[index], parent, tokens, scope=self.lineage.scope(index))


@dataclass(frozen=True, slots=True)
class PrefillWork:
    task: PrefillTask
    span: Span


class PrefillScheduler:
    """Owns the tasks of one prefill worker, their blocks and their slots 0 .. max_jobs-1.

    `plan` and `complete` (or `abandon`) alternate; anything else may be called in between, also while a planned step is
    running: what it writes is given back only when it is over.
    """

    def __init__(self, allocator: BlockAllocator, *, block_size: int, chunk_tokens: int, max_jobs: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._chunk_tokens = max(chunk_tokens // block_size, 1) * block_size  # chunks end with full blocks
        self._slots = range(max_jobs)
        self._free_slots = list(reversed(self._slots))
        self._waiting: list[PrefillTask] = []
        self._loading: list[PrefillTask] = []
        self._tasks: list[PrefillTask] = []
        self._in_step: dict[PrefillTask, PrefillWork] = {}

    @property
    def running(self) -> int:
        return len(self._tasks)

    def admit(self, task: PrefillTask) -> bool:
        """Give the task a slot and its blocks, with whatever prefix the pool has.

        False: it waits, and the caller asks again. The first to ask is the first to be admitted, or a long one would
        wait for ever. Raises OutOfBlocks for one that the whole pool could not hold.
        """
        if len(task.names) > self._allocator.num_blocks:
            raise OutOfBlocks(f"{len(task.names)} blocks wanted of a pool of {self._allocator.num_blocks}")
        if task not in self._waiting:
            self._waiting.append(task)
        if self._waiting[0] is not task or not self._free_slots or not self._take_blocks(task):
            return False
        self._waiting.remove(task)
        self._loading.append(task)
        task.slot = self._free_slots.pop()
        return True

    def _take_blocks(self, task: PrefillTask) -> bool:
        found = self._allocator.match(task.names)
        try:
            task.table = [*found, *self._allocator.allocate(len(task.names) - len(found))]
        except OutOfBlocks:
            self._allocator.release(found)
            return False
        task.computed = len(found) * self._block_size
        return True

    def start(self, task: PrefillTask) -> None:
        """The task takes part in steps from now on (loading from the shared cache is over)."""
        self._loading.remove(task)
        self._tasks.append(task)

    def filled(self, task: PrefillTask, index: int) -> None:
        """Block `index`, the first one missing, was loaded with its right bytes."""
        if index != task.have:
            raise TrineError(f"block {index} was loaded out of order")
        self._allocator.commit(task.table[index], task.names[index])
        task.computed += self._block_size

    def end(self, task: PrefillTask) -> None:
        """Done, cancelled or failed; may be called at any time, also twice."""
        if task.ended:
            return
        task.ended = True
        for tasks in (self._waiting, self._loading, self._tasks):
            if task in tasks:
                tasks.remove(task)
        if task not in self._in_step:
            self._release(task)

    def plan(self) -> list[PrefillWork]:
        """Chunks of the next forward pass; tasks that need nothing computed are not in it."""
        budget = self._chunk_tokens
        claimed: set[bytes] = set()
        works: list[PrefillWork] = []
        for task in sorted(self._tasks, key=lambda t: t.remaining - t.passed_over * self._chunk_tokens):
            self._take_over(task)
            if not task.remaining:
                continue
            if budget <= 0 or task.names[task.have] in claimed:
                task.passed_over += int(budget <= 0)
                continue
            count = min(task.remaining, budget)
            claimed.update(task.names[task.have :])
            tokens = task.tokens[task.computed : task.computed + count]
            works.append(PrefillWork(task, Span(tokens, task.computed, tuple(task.table), slot=task.slot)))
            budget -= count
        self._in_step = {w.task: w for w in works}
        return works

    def _take_over(self, task: PrefillTask) -> None:
        """Blocks that another task has computed since are taken instead of our own, still empty ones."""
        first = task.have
        shared = self._allocator.match(task.names[first:])
        self._allocator.release(task.table[first : first + len(shared)])
        task.table[first : first + len(shared)] = shared
        task.computed += len(shared) * self._block_size

    def complete(self, works: Seq[PrefillWork]) -> list[tuple[PrefillTask, range]]:
        """The forward pass is done: per task, the numbers of the blocks it filled."""
        filled = []
        for work in works:
            task = work.task
            del self._in_step[task]
            if task.ended:
                self._release(task)
                continue
            before = task.have
            task.computed = work.span.start + len(work.span.token_ids)
            for index in range(before, task.have):
                self._allocator.commit(task.table[index], task.names[index])
            filled.append((task, range(before, task.have)))
        return filled

    def abandon(self, works: Seq[PrefillWork]) -> None:
        """The forward pass failed: nothing of it counts."""
        for work in works:
            del self._in_step[work.task]
            if work.task.ended:
                self._release(work.task)

    def finished(self) -> list[PrefillTask]:
        """Tasks with nothing left to compute."""
        return [t for t in self._tasks if not t.remaining]

    def _release(self, task: PrefillTask) -> None:
        self._allocator.release(task.table)
        if task.slot != NO_SLOT:
            self._free_slots.append(task.slot)
        task.slot = NO_SLOT
        task.table = []

    def check_integrity(self, elsewhere: Iterable[Seq[int]] = ()) -> None:
        """Raises TrineError if tasks, blocks and slots contradict each other.

        `elsewhere`: lists of blocks on which others than this scheduler hold a reference.
        """
        holders = [*self._loading, *self._tasks, *(t for t in self._in_step if t.ended)]
        self._allocator.check_integrity([*(t.table for t in holders), *elsewhere])
        if sorted([*self._free_slots, *(t.slot for t in holders)]) != list(self._slots):
            raise TrineError(f"slots {self._free_slots} are free, {[t.slot for t in holders]} are held")
        if any(t.table for t in self._waiting):
            raise TrineError("a job that waits holds blocks")
        for task in holders:
            self._check_names(task)
        for work in self._in_step.values():
            self._check_written(work)

    def _check_names(self, task: PrefillTask) -> None:
        if len(task.table) != len(task.names) or task.computed % self._block_size:
            raise TrineError(f"{task.id}: {len(task.table)} of {len(task.names)} blocks, {task.computed} computed")
        for index, block in enumerate(task.table):
            name = self._allocator.name_of(block)
            if name is not None and (index >= task.have or name != task.names[index]):
                raise TrineError(f"{task.id}: block {block} is named, but unfull or not its block {index}")

    def _check_written(self, work: PrefillWork) -> None:
        """What a step writes is private."""
        first, end = work.span.start, work.span.start + len(work.span.token_ids)
        for block in work.span.table[first // self._block_size : end // self._block_size]:
            if self._allocator.references(block) != 1 or self._allocator.name_of(block) is not None:
                raise TrineError(f"{work.task.id}: block {block} is written, but others may read it")
        if work.span.slot != work.task.slot or work.span.table != tuple(work.task.table):
            raise TrineError(f"{work.task.id}: its blocks or its slot changed while its step runs")
