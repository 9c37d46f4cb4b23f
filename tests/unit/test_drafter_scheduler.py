"""Records of what came true, and which source is worth waiting for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.drafter.record import CERTAIN, Fit, Guess, Record
from services.drafter.scheduler import (
    MAX_ASKERS,
    MAX_PASSES,
    PASSES,
    TRIAL,
    Askers,
    Option,
    Trials,
    choose,
    worth_working,
)


class TestRecord:
    def test_rates_become_what_came_true(self) -> None:
        record, rng = Record([0.5, 0.5]), random.Random(0)
        for _ in range(3000):
            truth = [int(rng.random() < 0.9), int(rng.random() < 0.2)]
            record.learn(Guess("x", 0, (1, 1), (0, 1)), truth, Fit())
        assert record.rates == pytest.approx([0.9, 0.2], abs=0.08)

    def test_nothing_is_learnt_from_what_stands_behind_a_miss_or_is_not_known(self) -> None:
        record = Record([0.5] * 4)
        record.learn(Guess("x", 1, (7, 7, 7, 7), (0, 1, 2, 3)), [0, 7, 8, 7, 7], Fit())
        assert record.rates[0] > 0.5 > record.rates[1]
        assert record.rates[2:] == [0.5, 0.5]
        record.learn(Guess("x", 1, (7, 7), (2, 3)), [0, 7], Fit())
        assert record.rates[3] == 0.5

    def test_a_session_against_the_average(self) -> None:
        record, good, bad = Record([0.5]), Fit(), Fit()
        for _ in range(50):
            record.learn(Guess("x", 0, (1,), (0,)), [1], good)
            record.learn(Guess("x", 0, (1,), (0,)), [0], bad)
        assert record.chance(0, good) > 0.65 > 0.5 > 0.35 > record.chance(0, bad)
        assert record.chance(0, Fit()) == pytest.approx(0.5, abs=0.1)

    @given(st.lists(st.integers(0, 2), max_size=10))
    def test_expectations_are_sums_of_products(self, kinds: list[int]) -> None:
        record = Record([0.3, 0.6, 1.0])
        chances = [min(record.rates[k], CERTAIN) for k in kinds]
        products = list(itertools.accumulate(chances, lambda a, b: a * b))
        assert record.expected(kinds, Fit()) == pytest.approx(list(itertools.accumulate(products)))


def option(instant: float = 0.0, chance: float = 0.8, depth: int = 4, ready: int = 0, behind: float = 0.0) -> Option:
    sums = list(itertools.accumulate(chance ** (n + 1) for n in range(depth)))
    return Option(instant, sums, ready, behind)


def rate(options: Sequence[Option], depths: Sequence[int], steps: int, asker_s: float, step_s: float) -> float:
    gain = sum(o.model[d - 1] if d else o.instant for o, d in zip(options, depths, strict=True))
    return (len(options) + gain) / (asker_s + steps * step_s)


class TestChoose:
    def pick(self, *options: Option, asker_s: float = 0.03, step_s: float = 0.002, budget_s: float = 1.0) -> list[int]:
        return choose(options, asker_s=asker_s, step_s=step_s, budget_s=budget_s)

    def test_a_model_that_is_often_right_and_quick_is_waited_for(self) -> None:
        assert self.pick(option()) == [4]

    def test_one_that_is_slow_or_wrong_is_not(self) -> None:
        assert self.pick(option(), step_s=0.05) == [0]
        assert self.pick(option(chance=0.02)) == [0]

    def test_what_is_ready_costs_nothing(self) -> None:
        assert self.pick(option(ready=2), step_s=0.05) == [2]
        assert self.pick(option(ready=2, instant=2.0), step_s=0.05) == [0]

    def test_an_instant_answer_has_to_be_beaten_by_what_the_time_costs(self) -> None:
        assert self.pick(option(instant=1.6)) == [4]
        assert self.pick(option(instant=1.7)) == [0]

    def test_one_sequence_does_not_make_many_others_wait(self) -> None:
        eager = option(chance=0.7)
        assert self.pick(eager, step_s=0.005)[0] > 0
        assert self.pick(eager, *[option(instant=3.0)] * 15, step_s=0.005) == [0] * 16

    def test_never_longer_than_the_asker_waits(self) -> None:
        assert self.pick(option(), budget_s=0.0049) == [2]
        assert self.pick(option(behind=3.2), budget_s=0.0049) == [0]
        assert self.pick(option(behind=1.5), budget_s=0.0069) == [2]

    @given(
        st.lists(
            st.builds(option, st.floats(0, 4), st.floats(0, 0.98), st.integers(0, 6), st.integers(0, 6)),
            min_size=1,
            max_size=3,
        ),
        st.floats(0.001, 1),
        st.floats(0.001, 1),
        st.floats(0, 2),
    )
    def test_no_other_choice_promises_more(
        self, options: list[Option], asker_s: float, step_s: float, budget_s: float
    ) -> None:
        depths = choose(options, asker_s=asker_s, step_s=step_s, budget_s=budget_s)
        steps = max(max(d - o.ready, 0) for o, d in zip(options, depths, strict=True))
        assert steps * step_s <= budget_s
        mine = rate(options, depths, steps, asker_s, step_s)
        for other in itertools.product(*(range(len(o.model) + 1) for o in options)):
            waited = max(max(d - o.ready, 0) for o, d in zip(options, other, strict=True))
            if waited * step_s <= budget_s * (1 - 1e-9):
                assert rate(options, other, waited, asker_s, step_s) <= mine * (1 + 1e-9)

    def test_working_ahead_must_pay_too(self) -> None:
        assert worth_working(option(), asker_s=0.03, step_s=0.01)
        assert not worth_working(option(chance=0.05), asker_s=0.03, step_s=0.01)
        assert not worth_working(option(instant=3.0), asker_s=0.03, step_s=0.01)
        assert not worth_working(option(depth=0), asker_s=0.03, step_s=0.01)


class TestTrials:
    def test_ever_more_seldom_while_it_does_not_pay(self) -> None:
        trials, tried = Trials(), []
        for _ in range(20 * MAX_PASSES):
            tried.append(trials.due())
        starts = [i for i, (a, b) in enumerate(itertools.pairwise(tried)) if b and not a]
        gaps = [b - a for a, b in itertools.pairwise(starts)]
        assert gaps == sorted(gaps)
        assert gaps[0] == 2 * PASSES + TRIAL
        assert gaps[-1] == MAX_PASSES + TRIAL
        trials.paid()
        assert sum(trials.due() for _ in range(PASSES + TRIAL)) == TRIAL


class TestAskers:
    def test_time_between_an_answer_and_the_next_ask(self) -> None:
        askers = Askers()
        assert askers.asks("w", 0.0) is None
        askers.answered("w", 0.5)
        assert askers.asks("w", 0.53) == pytest.approx(0.03)
        askers.answered("w", 0.6)
        assert askers.asks("w", 5.0) == pytest.approx(0.03), "it had nothing to do"
        assert askers.asks("x", 5.0) is None

    def test_not_for_every_name_that_was_ever_heard(self) -> None:
        askers = Askers()
        for n in range(3 * MAX_ASKERS):
            askers.asks(f"w{n}", 0.0)
        askers.answered("w0", 1.0)
        assert len(askers._known) == MAX_ASKERS
