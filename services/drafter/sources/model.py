"""A small model as the source of drafts, run through the same paged engine as the target.

It chooses with the target's own noise for each position (design: Gumbel coupling), so at any temperature a draft
is as likely to be the target's choice as the two distributions allow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.drafter.sessions import Session
from services.drafter.sources.base import Wish
from shared.cache.blocks import BlockAllocator, OutOfBlocks
from shared.engine.base import StepEngine
from shared.engine.span import Span

PRIMING_TOKENS = 256  # of a prompt the model has not read, per call: the rest is read at the next ask
PREFILL_SPEEDUP = 8.0  # tokens read in about the time of one step
SMOOTHING = 0.2


@dataclass(slots=True)
class _State:
    """KV of `tokens` lies in `table`; tokens that turned out otherwise are simply computed over."""

    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)


class ModelSource:
    """Keeps its own small KV per session. When its pool is full, sessions that wait longest lose theirs."""

    name = "model"

    def __init__(self, engine: StepEngine, *, within_budget: bool) -> None:
        """`within_budget`: draft no deeper than the asker's patience allows, by the step time seen so far."""
        self._engine = engine
        self._within_budget = within_budget
        self._block_size = engine.info.block_size
        self._allocator = BlockAllocator(engine.info.kv_blocks, self._block_size)
        self._states: dict[Session, _State] = {}
        self._step_s = self._measure()

    def _measure(self) -> float:
        """Seconds of a single step, the first of which warms up."""
        for _ in range(3):
            started = time.monotonic()
            block = self._allocator.allocate(1)
            self._engine.step([Span((0,), 0, tuple(block), 1)])
            self._allocator.release(block)
        return time.monotonic() - started

    def draft(self, wishes: Sequence[Wish]) -> list[list[int]]:
        depth = [self._depth(w) for w in wishes]
        drafts: list[list[int]] = [[] for _ in wishes]
        active = [i for i, w in enumerate(wishes) if depth[i] and self._ready(w, depth[i])]
        while active:
            started = time.monotonic()
            taken = self._engine.step([self._span(wishes[i], drafts[i]) for i in active])
            self._note(time.monotonic() - started)
            for i, out in zip(active, taken, strict=True):
                state = self._states[wishes[i].session]
                state.tokens = [*wishes[i].tokens, *drafts[i]]
                drafts[i].append(out[0])
            active = [i for i in active if len(drafts[i]) < depth[i]]
        return drafts

    def expected_s(self, wish: Wish) -> float:
        state = self._states.get(wish.session)
        known = _common_prefix(state.tokens, wish.tokens) if state else 0
        unread = len(wish.tokens) - 1 - known
        return self._step_s * (1 if unread <= 0 else 2 + unread / PREFILL_SPEEDUP)

    def end(self, session: Session) -> None:
        if (state := self._states.pop(session, None)) is not None:
            self._allocator.release(state.table)

    def _depth(self, wish: Wish) -> int:
        room = self._engine.info.context_length - len(wish.tokens)
        depth = max(min(wish.k, room), 0)
        if self._within_budget:
            depth = min(depth, int(wish.budget_s / self._step_s))
        return depth

    def _ready(self, wish: Wish, depth: int) -> bool:
        """Blocks for the sequence and its drafts; a long unread part is read first, a piece per call (False)."""
        session, tokens = wish.session, wish.tokens
        state = self._states.setdefault(session, _State())
        state.tokens = state.tokens[: _common_prefix(state.tokens, tokens[:-1])]
        if not self._cover(session, state, len(tokens) + depth):
            return False
        start = len(state.tokens)
        if len(tokens) - start <= PRIMING_TOKENS:
            return True
        chunk = tokens[start : start + PRIMING_TOKENS]
        self._engine.step([Span(chunk, start, tuple(state.table))])
        state.tokens += chunk
        return False

    def _cover(self, session: Session, state: _State, length: int) -> bool:
        needed = -(-length // self._block_size) - len(state.table)
        while needed > 0:
            try:
                state.table += self._allocator.allocate(needed)
                break
            except OutOfBlocks:
                others = [s for s in self._states if s is not session and self._states[s].table]
                if not others:
                    return False
                self.end(others[0])
        return True

    def _span(self, wish: Wish, drafts: list[int]) -> Span:
        """All tokens whose KV is missing, the last of them for its logits."""
        tokens = (*wish.tokens, *drafts)
        state = self._states[wish.session]
        start = len(state.tokens)
        return Span(tokens[start:], start, tuple(state.table), 1, wish.sampling.seed or 0, wish.sampling)

    def _note(self, seconds: float) -> None:
        self._step_s += (seconds - self._step_s) * SMOOTHING


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
