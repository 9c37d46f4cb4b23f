"""The decode scheduler against a fake engine whose answers show any block that is wrong."""

from __future__ import annotations

import random

import pytest

from services.decode.scheduler import DecodeScheduler, accepted_count
from services.decode.sequence import AGEING_PLANS, NO_SLOT, Sequence
from shared.cache.blocks import BlockAllocator
from shared.cache.naming import Lineage
from shared.errors import ContextLengthExceeded
from shared.lifecycle import Phase
from shared.messages import Sampling
from tests.fake_engine import FakeEngine, completion, hidden_state

LINEAGE = Lineage(b"r" * 32, "default")


class Rig:
    """Scheduler, allocator and engine, driven as the service drives them."""

    def __init__(
        self,
        *,
        blocks: int = 32,
        context: int = 256,
        max_running: int = 8,
        step_tokens: int = 32,
        mixed_tokens: int | None = None,
    ) -> None:
        self.engine = FakeEngine(blocks=blocks, context=context)
        self.allocator = BlockAllocator(blocks, self.engine.info.block_size)
        self.scheduler = DecodeScheduler(
            self.allocator,
            block_size=self.engine.info.block_size,
            context_length=context,
            max_running=max_running,
            step_tokens=step_tokens,
            mixed_tokens=mixed_tokens,
        )
        self.answers: dict[str, list[int]] = {}
        self.hidden = False

    def submit(self, name: str, prompt: list[int], max_tokens: int, priority: int = 1) -> Sequence:
        sequence = Sequence(name, list(prompt), len(prompt), LINEAGE, max_tokens, Sampling(), 0, priority)
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
        works = self.scheduler.plan(hidden=self.hidden)
        if not works:
            return False
        outcomes = self.scheduler.complete(works, self.engine.sample([w.span for w in works]))
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


def test_a_hidden_state_is_the_last_tokens_whatever_was_accepted_and_preempted() -> None:
    rng = random.Random(1)
    rig = Rig(blocks=12)
    rig.hidden = True
    wanted = {}
    for number, prompt in enumerate(prompts(rng, 6, 16)):
        rig.submit(f"s{number}", prompt, 12)
        wanted[f"s{number}"] = completion(prompt, 12)
    told = 0
    while rig.step(3, rng):
        for sequence in rig.scheduler.live():
            known = hidden_state(len(sequence.tokens) - 1, sequence.tokens[-1]) if sequence.generated else b""
            assert sequence.hidden == known
            told += bool(known)
    assert rig.answers == wanted
    assert rig.scheduler.preemptions and told > 30


def test_no_hidden_state_of_another_attempt_nor_where_nobody_reads_it() -> None:
    rig = Rig()
    resumed = rig.submit("s", [1, 2, 3], 9)
    resumed.tokens += completion([1, 2, 3], 2)
    assert resumed.hidden == b""
    rig.hidden = True
    rig.step()
    assert resumed.hidden == hidden_state(5, resumed.tokens[-1])
    rig.hidden = False
    rig.step()
    assert resumed.generated == 4 and resumed.hidden == b""


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


def test_a_prompt_takes_less_of_a_step_while_others_decode() -> None:
    """They wait for it; alone, it takes what a step has."""
    rig = Rig(blocks=64, step_tokens=32, mixed_tokens=8)
    rig.submit("short", [1, 2], 3)
    rig.step()
    long = rig.submit("long", list(range(100)), 2)
    taken = []
    while long.computed < 100:
        before = long.computed
        rig.step()
        taken.append(long.computed - before)
    assert taken == [8, 8, 32, 32, 20]


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
    rig.scheduler.complete(works, rig.engine.sample([w.span for w in works]))
    assert rig.allocator.available == 4
    rig.scheduler.check_integrity()


def test_loading_fills_blocks_in_order_only() -> None:
    rig = Rig()
    sequence = rig.submit("s", list(range(12)), 1)
    rig.scheduler.admit()
    with pytest.raises(Exception, match="out of order"):
        rig.scheduler.filled(sequence, 1)
    assert rig.scheduler.place(sequence, 0) == sequence.table[0]
    rig.scheduler.filled(sequence, 0)
    assert sequence.computed == 4


@pytest.mark.parametrize("prompt_len", [28, 29, 31, 32, 33])
@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5])
def test_what_just_fits_is_served_and_what_needs_one_position_more_is_refused(prompt_len: int, max_tokens: int) -> None:
    rig = Rig(blocks=8)  # 32 positions; the last token's KV is never needed
    rig.submit("small", [1], 2)
    if prompt_len + max_tokens - 1 > 32:
        with pytest.raises(ContextLengthExceeded):
            rig.submit("big", list(range(prompt_len)), max_tokens)
    else:
        rig.submit("big", list(range(prompt_len)), max_tokens)
    rig.submit("behind", [2], 2)
    rig.run()
    assert rig.answers["small"] == completion([1], 2)
    assert rig.answers["behind"] == completion([2], 2)
    if "big" in rig.answers:
        assert rig.answers["big"] == completion(list(range(prompt_len)), max_tokens)


def test_twenty_long_ones_in_a_pool_for_three_all_finish_with_few_preemptions() -> None:
    rig = Rig(blocks=30, max_running=20)  # each comes to need 10
    for number in range(20):
        rig.submit(f"s{number}", [number, 1, 2, 3, 4], 35)
    steps = rig.run()
    for number in range(20):
        assert rig.answers[f"s{number}"] == completion([number, 1, 2, 3, 4], 35)
    assert rig.scheduler.preemptions <= 20
    assert steps <= 20 * 36 / 2  # two at a time at least, all told


def test_one_that_was_preempted_and_needs_the_whole_pool_is_admitted_when_it_is_alone() -> None:
    rig = Rig(blocks=8, max_running=2)
    rig.submit("old", [1] * 3, 10)
    young = rig.submit("young", [2] * 20, 13)  # 8 blocks in the end
    while not young.preemptions:
        assert rig.step()
    assert len(young.tokens) > 24
    rig.run()
    assert rig.answers["young"] == completion([2] * 20, 13)


@pytest.mark.parametrize(("preemptions", "left_over"), [(0, 1), (1, 3), (2, 5), (4, 17), (5, 32), (9, 32)])
def test_the_more_often_preempted_the_more_is_left_over_at_admission(preemptions: int, left_over: int) -> None:
    rig = Rig(blocks=64)
    rig.submit("runs", [1] * 2, 99)  # grows by 24 blocks beyond the one it has
    rig.step()
    again = rig.submit("again", [2] * 7, 34)  # needs 2, grows by 8
    again.preemptions = preemptions
    for available in range(2, 64):
        taken = rig.allocator.allocate(rig.allocator.available - available)
        admitted = rig.scheduler.admit()
        rig.allocator.release(taken)
        if admitted:
            assert available == 2 + left_over
            return


def test_the_youngest_of_the_lowest_priority_is_preempted_and_resumed_before_new_ones() -> None:
    rig = Rig(blocks=9, max_running=4)
    high, old, young = (
        rig.submit(n, [i] * 6, 20, priority=p) for i, (n, p) in enumerate(zip("hoy", (0, 2, 2), strict=True))
    )
    while not rig.scheduler.preemptions:
        assert rig.step()
    assert (high.preemptions, old.preemptions, young.preemptions) == (0, 0, 1)
    new = [rig.submit(f"new{i}", [9, i], 2, priority=2) for i in range(3)]
    while young.phase is Phase.WAITING:
        assert {s.phase for s in new} == {Phase.WAITING}
        assert rig.step()
    rig.run()
    assert rig.answers["y"] == completion([2] * 6, 20)


def test_one_that_loads_can_be_preempted_and_its_loader_can_tell() -> None:
    rig = Rig(blocks=8, max_running=2)
    old = rig.submit("old", [1] * 14, 18)
    rig.step()
    young = rig.submit("young", [2] * 9, 1)
    assert rig.scheduler.admit() == [young]
    epoch = young.epoch
    assert rig.scheduler.place(young, 0) is not None
    while young.phase is Phase.LOADING:
        works = rig.scheduler.plan()
        outcome = rig.scheduler.complete(works, rig.engine.sample([w.span for w in works]))[0]
        rig.answers["old"] += outcome.tokens
        rig.scheduler.check_integrity()
    assert young.phase is Phase.WAITING and not young.table
    assert old.preemptions == 0
    rig.scheduler.end(old)
    assert rig.scheduler.admit() == [young]
    assert young.epoch != epoch


def test_blocks_promised_to_one_that_loads_are_left_to_it_by_those_after_it() -> None:
    rig = Rig(blocks=12)
    low = rig.submit("low", [1] * 3, 40, priority=2)
    rig.step()
    high = rig.submit("high", [2] * 28, 2, priority=0)
    assert rig.scheduler.admit() == [high]
    for _ in range(30):
        works = rig.scheduler.plan()
        rig.scheduler.complete(works, rig.engine.sample([w.span for w in works]))
        rig.scheduler.check_integrity()
    assert low.preemptions == 0 and low.remaining == 1, "it stands by, with what it has"
    assert all(rig.scheduler.place(high, index) is not None for index in range(7))


def test_nobody_is_preempted_who_is_in_the_planned_step_already() -> None:
    rig = Rig(blocks=12)
    low = rig.submit("low", [1] * 5, 20, priority=2)
    rig.step()
    high = rig.submit("high", [2] * 20, 2, priority=0)
    rig.scheduler.loaded(rig.scheduler.admit()[0])
    taken = rig.allocator.allocate(rig.allocator.available)  # by somebody else: now the promise cannot be kept
    works = rig.scheduler.plan()
    assert [w.sequence for w in works] == [low]
    rig.scheduler.check_integrity([taken])
    assert high.phase is Phase.READY
    rig.allocator.release(taken)
    rig.scheduler.abandon(works)


def test_the_same_prompt_many_times_at_once_is_computed_once() -> None:
    rig = Rig(blocks=64)
    for number in range(4):
        rig.submit(f"s{number}", list(range(41)), 2)
    rig.run()
    assert (
        rig.engine.tokens_computed == 41 + 3 * 1 + 4 * 1
    )  # the prompt, the last token of the others, the first answer
    assert all(answer == completion(list(range(41)), 2) for answer in rig.answers.values())


def test_drafts_take_blocks_from_nobody() -> None:
    rig = Rig(blocks=5, max_running=2)
    first, second = rig.submit("first", [1] * 6, 8), rig.submit("second", [2] * 6, 7)
    rig.step()
    for sequence in (first, second):
        sequence.drafts = tuple(completion(sequence.tokens, 5))
    works = rig.scheduler.plan()
    assert [w.sequence for w in works] == [first, second]
    assert rig.scheduler.preemptions == 0
    assert [w.drafts for w in works] == [5, 1], "the second has those for which it needs no block"


@pytest.mark.parametrize("budget", [1, 7, 16, 30])
def test_a_step_keeps_its_budget_and_chunks_end_with_full_blocks(budget: int) -> None:
    rig = Rig(blocks=64, step_tokens=budget)
    for number in range(3):
        rig.submit(f"short{number}", [number], 30)
    rig.step()
    long = rig.submit("long", list(range(50)), 1)
    longer = rig.submit("longer", list(range(100, 170)), 1)
    while long.phase is not Phase.ENDED or longer.phase is not Phase.ENDED:
        for sequence in rig.scheduler.admit():
            rig.scheduler.loaded(sequence)
        for sequence in rig.scheduler.live():
            sequence.drafts = (1, 2, 3, 4) if sequence.generating else ()
        works = rig.scheduler.plan()
        generating = sum(w.sequence.remaining == 1 for w in works)
        assert sum(len(w.span.token_ids) for w in works) <= max(budget, generating) + 4
        for work in works:
            end = work.span.start + len(work.span.token_ids)
            assert work.sequence.remaining == 1 or end == len(work.sequence.tokens) or end % 4 == 0
        for outcome in rig.scheduler.complete(works, rig.engine.sample([w.span for w in works])):
            if outcome.sequence in (long, longer) and outcome.tokens:
                rig.scheduler.end(outcome.sequence)


@pytest.mark.parametrize("preempted", [False, True])
def test_a_low_one_finishes_under_an_endless_high_load(preempted: bool) -> None:
    rig = Rig(blocks=16, max_running=2)
    low = rig.submit("low", [7] * 20, 40, priority=2)
    if preempted:
        rig.step()
        assert low.slot != NO_SLOT
    finished = 0
    for steps in range(2 * AGEING_PLANS + 200):
        while rig.scheduler.waiting < 3:
            rig.submit(f"high{steps}-{rig.scheduler.waiting}", [steps % 1000] * 20, 20, priority=0)
        rig.step()
        finished += low.phase is Phase.ENDED
        if finished:
            break
    assert rig.answers["low"] == completion([7] * 20, 40)
    if not preempted:
        assert steps > 2 * AGEING_PLANS, "before it had waited so long, all the others were before it"


def test_accepted_count_stops_at_the_first_mismatch() -> None:
    assert accepted_count((1, 2, 3), (1, 2, 3, 4)) == 3
    assert accepted_count((1, 9, 3), (1, 2, 3, 4)) == 1
    assert accepted_count((), (1,)) == 0
