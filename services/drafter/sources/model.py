"""A small model as the source of drafts, run through the same paged engine as the target.

It chooses with the target's own noise for each position (design: Gumbel coupling), so at any temperature a draft
is as likely to be the target's choice as the two distributions allow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from services.drafter.sessions import Session
from services.drafter.sources.base import Wish
from shared.cache.blocks import BlockAllocator
from shared.engine.base import StepEngine
from shared.engine.span import Span

PRIMING_TOKENS = 256  # of a prompt the model has not read, per call: the rest is read at the next ask
PREFILL_SPEEDUP = 8.0  # tokens read in about the time of one step
SMOOTHING = 0.2


@dataclass(slots=True)
class _State:
    """`table` holds the KV of the first `length` of `tokens`, then of `drafts`.

    Tokens that turned out otherwise are simply computed over.
    """

    tokens: list[int]
    length: int = 0
    drafts: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)

    def known(self, wish: Wish) -> int:
        """How many of the wish's tokens have their KV in `table`."""
        if self.tokens is wish.tokens:
            common = min(self.length, wish.length)
        else:
            common = common_prefix(self.tokens[: self.length], wish.tokens[: wish.length])
        if common < self.length:
            return common
        came_true = wish.tokens[common : min(wish.length, common + len(self.drafts))]
        return common + common_prefix(self.drafts, came_true)


class ModelSource:
    """Keeps its own small KV per session. When its pool is full, those least recently drafted for lose theirs."""

    name = "model"

    def __init__(self, engine: StepEngine, *, within_budget: bool) -> None:
        """`within_budget`: draft no deeper than the asker's patience allows, by the step time seen so far."""
        self._engine = engine
        self._within_budget = within_budget
        self._block_size = engine.info.block_size
        self._allocator = BlockAllocator(engine.info.kv_blocks, self._block_size)
        self._states: dict[Session, _State] = {}  # least recently drafted for first
        self._step_s = self._measure()

    def _measure(self) -> float:
        """Seconds of a single step, the first of which warms up."""
        for _ in range(3):
            started = time.monotonic()
            block = self._allocator.allocate(1)
            self._engine.step([Span((0,), 0, tuple(block), 1)])
            self._allocator.release(block)
        return max(time.monotonic() - started, 1e-6)

    def draft(self, wishes: Sequence[Wish]) -> list[list[int]]:
        depth = [self._depth(w) for w in wishes]
        drafts: list[list[int]] = [[] for _ in wishes]
        batch = {w.session for w, d in zip(wishes, depth, strict=True) if d}
        active = [i for i, w in enumerate(wishes) if depth[i] and self._ready(w, depth[i], batch)]
        while active:
            started = time.monotonic()
            taken = self._engine.step([self._span(wishes[i], drafts[i]) for i in active])
            self._note(time.monotonic() - started)
            for i, out in zip(active, taken, strict=True):
                state = self._states[wishes[i].session]
                state.length, state.drafts = wishes[i].length, list(drafts[i])
                drafts[i].append(out[0])
            active = [i for i in active if len(drafts[i]) < depth[i]]
        return drafts

    def expected_s(self, wish: Wish) -> float:
        state = self._states.get(wish.session)
        unread = wish.length - 1 - (state.known(wish) if state else 0)
        return self._step_s * (1 if unread <= 0 else 2 + unread / PREFILL_SPEEDUP)

    def end(self, session: Session) -> None:
        if (state := self._states.pop(session, None)) is not None:
            self._allocator.release(state.table)

    def _depth(self, wish: Wish) -> int:
        room = self._engine.info.context_length - wish.length
        depth = max(min(wish.k, room), 0)
        if self._within_budget:
            depth = int(min(depth, wish.budget_s / self._step_s))
        return depth

    def _ready(self, wish: Wish, depth: int, batch: Set[Session]) -> bool:
        """Blocks for the sequence and its drafts; a long unread part is read first, a piece per call (False)."""
        state = self._states.pop(wish.session, None) or _State(wish.tokens)
        self._states[wish.session] = state
        start = min(state.known(wish), wish.length - 1)  # the last token is needed for its logits
        state.tokens, state.length, state.drafts = wish.tokens, start, []
        if not self._cover(wish.session, wish.length + depth, batch):
            return False
        if wish.length - start <= PRIMING_TOKENS:
            return True
        end = start + PRIMING_TOKENS
        self._engine.step([Span(tuple(wish.tokens[start:end]), start, tuple(state.table))])
        state.length = end
        return False

    def _cover(self, session: Session, length: int, batch: Set[Session]) -> bool:
        """Blocks for `length` positions, if need be from sessions outside `batch`, which is what runs now.

        False when there are not enough: the session gives back what it has, so that others of the batch fit.
        """
        state = self._states[session]
        needed = max(-(-length // self._block_size) - len(state.table), 0)
        idle = [s for s in self._states if s not in batch] if needed > self._allocator.available else []
        if needed > self._allocator.available + sum(len(self._states[s].table) for s in idle):
            self.end(session)
            return False
        for other in idle:
            if needed <= self._allocator.available:
                break
            self.end(other)
        state.table += self._allocator.allocate(needed)
        return True

    def _span(self, wish: Wish, drafts: list[int]) -> Span:
        """All tokens whose KV is missing, the last of them for its logits."""
        state = self._states[wish.session]
        start = state.length + len(state.drafts)
        tokens = wish.tokens[start : wish.length] + drafts[max(start - wish.length, 0) :]
        return Span(tuple(tokens), start, tuple(state.table), 1, wish.sampling.seed or 0, wish.sampling)

    def _note(self, seconds: float) -> None:
        self._step_s += (seconds - self._step_s) * SMOOTHING


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix, by comparing slices: much faster than token by token."""
    same, end = 0, min(len(a), len(b))  # [:same] is common; the answer is at most `end`
    while same < end:
        middle = (same + end + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same
