"""The decode scheduler against a fake engine whose answers show any block that is wrong."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decode.scheduler import DecodeScheduler, accepted_count
from services.decode.sequence import Sequence
from shared.cache.blocks import BlockAllocator
from shared.errors import ContextLengthExceeded
from shared.lifecycle import Phase
from shared.messages import Sampling
from tests.fake_engine import FakeEngine, completion

ROOT = b"r" * 32


class Rig:
    """Scheduler, allocator and engine, driven as the service drives them."""

    def __init__(self, *, blocks: int = 32, context: int = 256, max_running: int = 8, step_tokens: int = 32) -> None:
        self.engine = FakeEngine(blocks=blocks, context=context)
        self.allocator = BlockAllocator(blocks, self.engine.info.block_size)
        self.scheduler = DecodeScheduler(
            self.allocator,
            block_size=self.engine.info.block_size,
            context_length=context,
            max_running=max_running,
            step_tokens=step_tokens,
        )
        self.answers: dict[str, list[int]] = {}

    def submit(self, name: str, prompt: list[int], max_tokens: int, priority: int = 1) -> Sequence:
        sequence = Sequence(name, list(prompt), len(prompt), ROOT, max_tokens, Sampling(), 0, priority)
        self.scheduler.submit(sequence)
        self.answers[name] = []
        return sequence

    def step(self, draft: int = 0, rng: random.Random | None = None) -> bool:
        """One step; sequences get `draft` drafts, some of them wrong. False if there was nothing to do."""
        for sequence in self.scheduler.admit():
            self.scheduler.loaded(sequence)
        if draft and rng:
            for sequence in self.scheduler.live():
                right = completion(sequence.tokens, draft)
                sequence.drafts = tuple(t if rng.random() < 0.7 else (t + 1) % 1000 for t in right)
        works = self.scheduler.plan()
        if not works:
            return False
        outcomes = self.scheduler.complete(works, self.engine.step([w.span for w in works]))
        for outcome in outcomes:
            sequence = outcome.sequence
            room = sequence.max_tokens - len(self.answers[sequence.id])
            self.answers[sequence.id] += outcome.tokens[:room]
            if len(self.answers[sequence.id]) == sequence.max_tokens:
                self.scheduler.end(sequence)
        self.scheduler.check_integrity()
        return True

    def run(self, draft: int = 0, seed: int = 0, limit: int = 5000) -> int:
        rng = random.Random(seed)
        steps = 0
        while self.step(draft, rng):
            steps += 1
            assert steps < limit, "no progress"
        return steps


def prompts(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    shared = [rng.randrange(1000) for _ in range(longest)]
    return [
        shared[: rng.randrange(longest // 2)] + [rng.randrange(1000) for _ in range(rng.randrange(1, longest // 2))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16])
def test_every_prompt_length_around_block_edges_cold_and_warm(length: int) -> None:
    rig = Rig()
    prompt = list(range(1, length + 1))
    for turn in range(3):
        sequence = rig.submit(f"s{turn}", prompt, 9)
        rig.run()
        assert rig.answers[f"s{turn}"] == completion(prompt, 9)
        assert sequence.phase is Phase.ENDED
    assert rig.allocator.in_use == 0


def test_a_cached_prefix_is_not_computed_again_but_its_last_token_is() -> None:
    rig = Rig()
    prompt = list(range(100, 116))  # exactly 4 blocks
    rig.submit("cold", prompt, 1)
    rig.run()
    cold = rig.engine.tokens_computed
    rig.submit("warm", prompt, 1)
    rig.run()
    assert cold == 16
    assert rig.engine.tokens_computed - cold == 4  # the last block, for the last token's logits
    assert rig.answers["warm"] == rig.answers["cold"] == completion(prompt, 1)


@pytest.mark.parametrize("draft", [0, 1, 3, 5, 9])
def test_drafts_change_speed_only(draft: int) -> None:
    rng = random.Random(draft)
    rig = Rig(blocks=64)
    wanted = {}
    for number, prompt in enumerate(prompts(rng, 6, 30)):
        rig.submit(f"s{number}", prompt, 25)
        wanted[f"s{number}"] = completion(prompt, 25)
    steps = rig.run(draft, seed=draft)
    assert rig.answers == wanted
    if draft:
        assert steps < 30


def test_max_tokens_is_exact_for_every_number_of_drafts() -> None:
    for max_tokens in range(1, 12):
        rig = Rig()
        rig.submit("s", [1, 2, 3], max_tokens)
        rig.run(draft=5, seed=1)
        assert rig.answers["s"] == completion([1, 2, 3], max_tokens)


def test_the_context_is_never_passed() -> None:
    rig = Rig(context=16)
    sequence = rig.submit("s", list(range(13)), 3)
    rig.run(draft=8, seed=3)
    assert rig.answers["s"] == completion(list(range(13)), 3)
    assert len(sequence.tokens) == 16


def test_what_can_never_fit_is_refused_at_once_and_blocks_nobody() -> None:
    rig = Rig(blocks=8)
    with pytest.raises(ContextLengthExceeded):
        rig.submit("big", list(range(30)), 10)
    rig.submit("fits", list(range(30)), 2)
    rig.submit("small", [1], 2)
    rig.run()
    assert rig.answers["fits"] == completion(list(range(30)), 2)
    assert rig.answers["small"] == completion([1], 2)


def test_a_full_pool_preempts_the_youngest_and_everybody_finishes() -> None:
    rig = Rig(blocks=16, max_running=8)
    for number in range(8):
        rig.submit(f"s{number}", [number] * 6, 30)
    rig.run()
    assert rig.scheduler.preemptions > 0
    for number in range(8):
        assert rig.answers[f"s{number}"] == completion([number] * 6, 30)
    assert rig.allocator.in_use == 0


def test_decoding_goes_on_while_a_long_prompt_is_prefilled() -> None:
    rig = Rig(blocks=64, step_tokens=8)
    rig.submit("first", [1, 2], 20)
    rig.step()
    rig.submit("long", list(range(100)), 2)
    before = len(rig.answers["first"])
    for _ in range(5):
        rig.step()
    assert len(rig.answers["first"]) == before + 5
    assert rig.answers["long"] == []


def test_priority_then_age_decides_who_is_admitted() -> None:
    rig = Rig(max_running=1)
    rig.submit("low", [1], 1, priority=2)
    rig.submit("high", [2], 1, priority=0)
    rig.submit("normal", [3], 1, priority=1)
    order = []
    while rig.step():
        order += [n for n, a in rig.answers.items() if a and n not in order]
    assert order == ["high", "normal", "low"]


def test_ending_a_sequence_while_its_step_runs_keeps_its_blocks_until_the_step_is_over() -> None:
    rig = Rig(blocks=4)
    sequence = rig.submit("s", list(range(10)), 4)
    rig.scheduler.admit()
    rig.scheduler.loaded(sequence)
    works = rig.scheduler.plan()
    rig.scheduler.end(sequence)
    assert rig.allocator.available == 1
    rig.scheduler.complete(works, rig.engine.step([w.span for w in works]))
    assert rig.allocator.available == 4
    rig.scheduler.check_integrity()


def test_loading_fills_blocks_in_order_only() -> None:
    rig = Rig()
    sequence = rig.submit("s", list(range(12)), 1)
    rig.scheduler.admit()
    with pytest.raises(Exception, match="out of order"):
        rig.scheduler.filled(sequence, 1)
    rig.scheduler.filled(sequence, 0)
    assert sequence.computed == 4


def test_accepted_count_stops_at_the_first_mismatch() -> None:
    assert accepted_count((1, 2, 3), (1, 2, 3, 4)) == 3
    assert accepted_count((1, 9, 3), (1, 2, 3, 4)) == 1
    assert accepted_count((), (1,)) == 0


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(6, 40), draft=st.integers(0, 6), budget=st.integers(1, 40))
def test_random_arrivals_cancels_and_pool_sizes(seed: int, blocks: int, draft: int, budget: int) -> None:
    rng = random.Random(seed)
    rig = Rig(blocks=blocks, max_running=rng.randrange(1, 9), step_tokens=budget)
    wanted: dict[str, list[int]] = {}
    cancelled: set[str] = set()
    pending = prompts(rng, 12, 40)
    while True:
        if pending and rng.random() < 0.4:
            prompt, name = pending.pop(), f"s{len(pending)}"
            count = rng.randrange(1, 20)
            try:
                rig.submit(name, prompt, count, priority=rng.randrange(3))
                wanted[name] = completion(prompt, count)
            except ContextLengthExceeded:
                continue
        if rng.random() < 0.05 and (live := rig.scheduler.live()):
            victim = rng.choice(live)
            cancelled.add(victim.id)
            rig.scheduler.end(victim)
        if not rig.step(draft, rng) and not pending:
            break
    assert rig.allocator.in_use == 0
    for name, tokens in wanted.items():
        got = rig.answers[name]
        assert got == tokens[: len(got)]
        assert len(got) == len(tokens) or name in cancelled
