"""Which prefill jobs share the next forward pass, and how many tokens of each. Pure: no I/O, no clock, no torch.

Shortest remaining first, so that short prompts do not wait behind long ones; every step that a job is passed over
makes it count as shorter, so that long ones do not starve. Jobs with a common prefix are joined: while one computes
a block, the others wait for it and take it from the pool.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from shared.cache import naming
from shared.cache.blocks import BlockAllocator, OutOfBlocks
from shared.cache.frames import BlockMeta
from shared.engine.span import Span
from shared.errors import TrineError


@dataclass(slots=True, eq=False)
class PrefillTask:
    """The blocks of one job. `computed` tokens have their KV in `table`; `ended` jobs hold no blocks."""

    id: str
    tokens: tuple[int, ...]
    root: bytes
    block_size: int
    names: list[bytes] = field(init=False)
    table: list[int] = field(default_factory=list)
    computed: int = 0
    passed_over: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.names = naming.chain(self.root, self.tokens, self.block_size)
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
        parent = self.names[index - 1] if index else self.root
        return BlockMeta(
            self.names[index], parent, self.tokens[index * self.block_size : (index + 1) * self.block_size]
        )


@dataclass(frozen=True, slots=True)
class PrefillWork:
    task: PrefillTask
    span: Span


class PrefillScheduler:
    """Owns the tasks of one prefill worker and their blocks. `plan` and `complete` alternate."""

    def __init__(self, allocator: BlockAllocator, *, block_size: int, chunk_tokens: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._chunk_tokens = max(chunk_tokens, block_size)
        self._tasks: list[PrefillTask] = []
        self._in_step: set[PrefillTask] = set()

    @property
    def running(self) -> int:
        return len(self._tasks)

    def admit(self, task: PrefillTask) -> None:
        """Give the task its blocks, with whatever prefix the pool has. Raises OutOfBlocks: try again later."""
        found = self._allocator.match(task.names)
        try:
            task.table = [*found, *self._allocator.allocate(len(task.names) - len(found))]
        except OutOfBlocks:
            self._allocator.release(found)
            raise
        task.computed = len(found) * self._block_size

    def start(self, task: PrefillTask) -> None:
        """The task takes part in steps from now on (loading from the shared cache is over)."""
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
        if task in self._tasks:
            self._tasks.remove(task)
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
            works.append(self._work(task, count))
            budget -= count
        self._in_step = {w.task for w in works}
        return works

    def _take_over(self, task: PrefillTask) -> None:
        """Blocks that another task has computed since are taken instead of our own, still empty ones."""
        if task.computed % self._block_size:
            return
        shared = self._allocator.match(task.names[task.have :])
        if shared:
            first = task.have
            self._allocator.release(task.table[first : first + len(shared)])
            task.table[first : first + len(shared)] = shared
            task.computed += len(shared) * self._block_size

    def _work(self, task: PrefillTask, count: int) -> PrefillWork:
        tokens = task.tokens[task.computed : task.computed + count]
        return PrefillWork(task, Span(tokens, task.computed, tuple(task.table)))

    def complete(self, works: Seq[PrefillWork]) -> list[tuple[PrefillTask, range]]:
        """The forward pass is done: per task, the numbers of the blocks it filled."""
        self._in_step = set()
        filled = []
        for work in works:
            task = work.task
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
        self._in_step = set()
        for work in works:
            if work.task.ended:
                self._release(work.task)

    def finished(self) -> list[PrefillTask]:
        """Tasks with nothing left to compute."""
        return [t for t in self._tasks if not t.remaining]

    def _release(self, task: PrefillTask) -> None:
        self._allocator.release(task.table)
        task.table = []
