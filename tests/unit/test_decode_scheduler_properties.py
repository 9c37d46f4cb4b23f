"""The decode scheduler under random loads: whatever happens in whatever order, answers are right and nothing leaks.

The engine's KV is the tokens themselves, so a block that is shared wrongly or given back too early makes a wrong token.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.decode.scheduler import DecodeScheduler
from services.decode.sequence import Sequence, Work
from shared.cache.blocks import BlockAllocator
from shared.cache.naming import Lineage
from shared.errors import ContextLengthExceeded
from shared.lifecycle import Phase
from shared.messages import Sampling
from tests.fake_engine import completion
from tests.sealed_engine import SealedEngine

LINEAGE = Lineage(b"r" * 32, "default")
CONTEXT = 96
FAMILIES = [[(7 * n + 13 * family) % 1000 for n in range(CONTEXT)] for family in range(2)]


@dataclass(frozen=True)
class Shape:
    """A worker: its pool, from tiny to roomy, its step, and how far it guesses ahead."""

    blocks: int
    block_size: int
    max_running: int
    step_tokens: int
    mixed_tokens: int | None
    depth: int


@dataclass(eq=False)
class _Loader:
    """Brings the blocks of one admission; it finds out for itself that its sequence was preempted or has ended."""

    sequence: Sequence
    epoch: int
    next: int

    @property
    def stale(self) -> bool:
        return self.sequence.epoch != self.epoch or self.sequence.phase is not Phase.LOADING


class World:
    """A decode worker without messages or clock. Every operation is followed by a check of everything."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.engine = SealedEngine(
            blocks=shape.blocks,
            block_size=shape.block_size,
            slots=shape.max_running,
            lookahead=shape.depth,
            context=CONTEXT,
        )
        self.allocator = BlockAllocator(shape.blocks, shape.block_size)
        self.scheduler = DecodeScheduler(
            self.allocator,
            block_size=shape.block_size,
            context_length=CONTEXT,
            max_running=shape.max_running,
            step_tokens=shape.step_tokens,
            mixed_tokens=shape.mixed_tokens,
        )
        self.wanted: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.sequences: list[Sequence] = []
        self.cancelled: set[str] = set()
        self.loading: list[_Loader] = []
        self.pending: list[Work] = []
        self.store: dict[bytes, list[int]] = {}
        self.publishing: list[tuple[bytes, int]] = []  # as the publisher does, it holds a reference until stored
        self.plans = 0

    # Operations: each takes a number that decides what it does

    def arrive(self, n: int) -> None:
        rng = random.Random(n)
        tail = [rng.randrange(1000) for _ in range(rng.randrange(16) if n % 4 else 0)]
        prompt = FAMILIES[n % 2][: rng.randrange(1, 30)] + tail
        most = rng.randrange(1, 50)
        sequence = Sequence(f"s{len(self.sequences)}", prompt, len(prompt), LINEAGE, most, Sampling(), 0, n % 3)
        fits = math.ceil((len(prompt) + sequence.max_tokens - 1) / self.shape.block_size) <= self.shape.blocks
        try:
            self.scheduler.submit(sequence)
        except ContextLengthExceeded:
            assert not fits
            return
        assert fits
        self.sequences.append(sequence)
        self.wanted[sequence.id] = completion(prompt, sequence.max_tokens)
        self.answers[sequence.id] = []

    def cancel(self, n: int) -> None:
        if live := self.scheduler.live():
            sequence = live[n % len(live)]
            self.cancelled.add(sequence.id)
            self.scheduler.end(sequence)

    def admit(self, n: int) -> None:
        admitted = self.scheduler.admit()
        self.loading += [_Loader(s, s.epoch, s.computed // self.shape.block_size) for s in admitted]
        waiting = [s.turn for s in self.scheduler.live() if s.phase is Phase.WAITING]
        assert not admitted or not waiting or max(s.turn for s in admitted) < min(waiting), "one was overtaken"

    def load(self, n: int) -> None:
        """One block for one that is loading; or it misses, or loading fails, which is over then in any case."""
        if not self.loading:
            return
        loader = self.loading[n % len(self.loading)]
        if not loader.stale and self._load_block(loader, n):
            loader.next += 1
            return
        if not loader.stale:
            self.scheduler.loaded(loader.sequence)
        self.loading.remove(loader)

    def _load_block(self, loader: _Loader, n: int) -> bool:
        name = (*loader.sequence.names, b"")[loader.next]
        if name not in self.store or n % 16 == 0:
            return False
        block = self.scheduler.place(loader.sequence, loader.next)
        if block is None:
            return False
        self.engine.load(block, self.store[name])
        self.scheduler.filled(loader.sequence, loader.next)
        return True

    def publish(self, n: int) -> None:
        if self.publishing:
            name, block = self.publishing.pop(0)
            self.store[name] = self.engine.block(block)
            self.allocator.release([block])

    def plan(self, n: int) -> None:
        """Plan, with drafts that are partly wrong."""
        if self.pending:
            return
        rng = random.Random(n)
        for sequence in self.scheduler.live():
            if sequence.generating:
                right = completion(sequence.tokens, rng.randrange(self.shape.depth + 1))
                sequence.drafts = tuple(t if rng.random() < 0.7 else (t + 1) % 1000 for t in right)
        ranked = sorted((s for s in self.scheduler.live() if s.phase is not Phase.WAITING), key=lambda s: s.rank)
        self.pending = self.scheduler.plan()
        self.plans += 1
        self._check_plan(ranked)

    def _check_plan(self, ranked: list[Sequence]) -> None:
        """`ranked`: the sequences that were admitted before it."""
        planned = {w.sequence for w in self.pending}
        generating = [s for s in ranked if s.generating]
        tokens = sum(len(w.span.token_ids) for w in self.pending)
        assert tokens <= max(self.shape.step_tokens, len(generating)) + self.shape.block_size
        prompts = [len(w.span.token_ids) for w in self.pending if w.span.rows != len(w.span.token_ids)]
        if self.shape.mixed_tokens is not None and planned.intersection(generating):
            assert sum(prompts) <= max(self.shape.mixed_tokens, self.shape.block_size)
        if not self.publishing:
            assert ranked[:1] != generating[:1] or planned.issuperset(ranked[:1]), "the first in rank stands by"
            if self.shape.blocks >= len(ranked) * math.ceil(CONTEXT / self.shape.block_size):
                assert planned.issuperset(generating), "a running sequence stands by although there is room"
        for place, victim in enumerate(ranked):
            if victim.phase is Phase.WAITING:
                spared = [s for s in ranked[place + 1 :] if s.phase is not Phase.WAITING]
                assert planned.issuperset(spared), "one that comes after the preempted one keeps its blocks"

    def finish(self, n: int) -> None:
        """The step ends: well, or by failing as a whole, or for some of its spans."""
        works, self.pending = self.pending, []
        bad = [w for i, w in enumerate(works) if n % 8 == 0 or (n % 8 == 1 and (n >> 3) % 3 == i % 3)]
        good = [w for w in works if w not in bad]
        self.engine.fail([w.span for w in bad])
        outcomes = self.scheduler.complete(good, self.engine.sample([w.span for w in good]))
        self.scheduler.abandon(bad)
        for outcome in outcomes:
            self._deliver(outcome.sequence, list(outcome.tokens), outcome.filled)

    def _deliver(self, sequence: Sequence, tokens: list[int], filled: range) -> None:
        for index in filled:
            self.publishing += zip([sequence.names[index]], self.allocator.match([sequence.names[index]]), strict=True)
        answer, wanted = self.answers[sequence.id], self.wanted[sequence.id]
        answer += tokens
        assert answer == wanted[: len(answer)]
        if answer == wanted:
            self.scheduler.end(sequence)

    # Driving

    def do(self, operation: Callable[[World, int], None], n: int) -> None:
        operation(self, n)
        self.scheduler.check_integrity([[block] for _, block in self.publishing])

    def drain(self, limit: int) -> None:
        """No more trouble: all that is left must finish within `limit` plans."""
        for turn in range(limit):
            if not self.scheduler.live():
                break
            self.do(World.admit, 0)
            if turn % 8 == 0:  # slowly, as from a prefill worker: they may well be preempted meanwhile
                self.do(World.load, 16 * turn + 1 + turn // 8)
            self.do(World.plan, turn)
            self.do(World.finish, 2)
            self.do(World.publish, 0)
        assert not self.scheduler.live(), "no progress"
        self.do(World.finish, 2)
        while self.publishing:
            self.do(World.publish, 0)

    def check_end(self) -> None:
        assert self.allocator.in_use == 0
        for sequence in self.sequences:
            assert sequence.id in self.cancelled or self.answers[sequence.id] == self.wanted[sequence.id]
            assert sequence.preemptions <= math.log2(self.shape.blocks) + 1, "as often as its margin can double"

    def serial_plans(self) -> int:
        """Plans that one at a time would take, once for each time that it is admitted."""
        return sum((len(s.tokens) + s.max_tokens + 2) * (1 + s.preemptions) for s in self.sequences)


OPERATIONS = [World.arrive, World.cancel, World.admit, World.load, World.publish, World.plan, World.finish]
OFTEN = [*OPERATIONS, *[World.admit, World.plan, World.finish] * 5, World.arrive, World.publish]
SHAPES = st.builds(
    Shape,
    blocks=st.integers(4, 40),
    block_size=st.integers(2, 4),
    max_running=st.integers(1, 7),
    step_tokens=st.integers(1, 40),
    mixed_tokens=st.one_of(st.none(), st.integers(1, 40)),
    depth=st.integers(0, 6),
)
SCRIPTS = st.lists(st.tuples(st.sampled_from(OFTEN), st.integers(0, 2**16)), min_size=20, max_size=120)


def play(shape: Shape, script: list[tuple[Callable[[World, int], None], int]]) -> World:
    world = World(shape)
    for operation, n in script:
        world.do(operation, n)
    world.drain(limit=20 + 3 * world.serial_plans())
    world.check_end()
    return world


COMMON = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@settings(COMMON, max_examples=120)
@given(shape=SHAPES, script=SCRIPTS)
def test_any_load_is_answered_right(shape: Shape, script: list[tuple[Callable[[World, int], None], int]]) -> None:
    play(shape, script)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(COMMON, max_examples=1000)
@given(shape=SHAPES, script=SCRIPTS)
def test_any_load_is_answered_right_thousands(
    shape: Shape, script: list[tuple[Callable[[World, int], None], int]]
) -> None:
    play(shape, script)
