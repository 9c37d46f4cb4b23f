"""What drafts are worth, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trine.forecast import AtDepth, Costs, Forecast, Propose, Walk, agreeing, verdict

ANSWER = [5, 6, 7, 8, 9, 10, 11, 12]


def guessing(guesses: Sequence[int]) -> Propose:
    return lambda at, depth: guesses[at : at + depth]


def forecast(k: int, *speedups: float) -> Forecast:
    return Forecast((1.0,), tuple(AtDepth(k + i, 1.0, speedup) for i, speedup in enumerate(speedups)))


def test_drafts_count_up_to_the_first_that_is_wrong() -> None:
    assert agreeing([1, 2, 3], [1, 2, 3, 4]) == 3
    assert agreeing([1, 9, 3], [1, 2, 3, 4]) == 1
    assert agreeing([9, 2, 3], [1, 2, 3, 4]) == 0
    assert agreeing([], [1]) == 0


def test_an_answer_walked_in_steps() -> None:
    wrong_at_3 = [*ANSWER[:3], 0, *ANSWER[4:]]
    # Token 0 comes with the prompt; 1 and 2 are right, the target gives 3; 4, 5 and 6 likewise; 7 is all that is left.
    assert Walk.of(ANSWER, guessing(wrong_at_3), 2).steps == ((2, 2), (2, 2), (0, 0))
    assert Walk.of(ANSWER, guessing(wrong_at_3), 3).steps == ((3, 2), (3, 3))
    assert Walk.of(ANSWER, guessing([0] * 8), 4).steps == ((4, 0), (4, 0), (4, 0), (3, 0), (2, 0), (1, 0), (0, 0))
    assert Walk.of(ANSWER, guessing([]), 4).steps == ((0, 0),) * 7, "no drafts, single steps"
    assert Walk.of([5], guessing(ANSWER), 4).steps == ()


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_token_is_given_once(depth: int, every: int) -> None:
    guesses = [0 if i % every else t for i, t in enumerate(ANSWER)]
    steps = Walk.of(ANSWER, guessing(guesses), depth).steps
    assert sum(accepted + 1 for _, accepted in steps) == len(ANSWER) - 1


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = Costs(0.2, {1: 1.0, 2: 1.1, 5: 1.7})
    assert [costs.step(drafts) for drafts in (0, 1, 4)] == [1.0, 1.1, 1.7]
    assert costs.step(2) == pytest.approx(1.3)
    assert costs.step(6) == pytest.approx(2.1)


def test_a_speed_up_is_tokens_per_cost() -> None:
    walks = [Walk(((2, 2), (2, 0))), Walk(((2, 1), (0, 0)))]
    found = Forecast.of({2: walks}, Costs(0.25, {1: 1.0, 3: 1.5}))
    assert found.depths[0].accepted == pytest.approx(3 / 4)
    assert found.depths[0].speedup == pytest.approx((3 + 4) / (3 * (1.5 + 2 * 0.25) + 1.0))
    assert list(found.by_place) == pytest.approx([2 / 3, 1 / 2]), "of those whose predecessors were right"


def test_always_right_at_no_cost_is_k_plus_1_times_as_fast() -> None:
    answer = list(range(1, 1 + 5 * 20 + 1))
    walks = {k: [Walk.of(answer, guessing(answer), k)] for k in (1, 4)}
    found = Forecast.of(walks, Costs(0.0, {1: 1.0, 9: 1.0}))
    assert [(at.accepted, at.speedup) for at in found.depths] == [(1.0, 2.0), (4.0, 5.0)]
    assert found.best.k == 4
    assert found.by_place == (1.0, 1.0, 1.0, 1.0)


def test_useless_drafts_cost_what_they_cost() -> None:
    walks = {k: [Walk.of(ANSWER * 4, guessing([0] * 32), k)] for k in (1, 4)}
    found = Forecast.of(walks, Costs(0.5, {1: 1.0, 2: 1.0, 5: 1.0}))
    assert found.depths[0].speedup == pytest.approx(1 / 1.5, rel=0.05)
    assert found.depths[1].speedup < found.depths[0].speedup
    assert not found.pays
    assert found.by_place == (0.0,)


def test_nothing_to_go_by_is_no_gain() -> None:
    found = Forecast.of({1: [Walk(())]}, Costs(0.5, {1: 1.0, 2: 1.0}))
    assert (found.by_place, found.best) == ((), AtDepth(1, 0.0, 1.0))


def test_a_verdict_in_words() -> None:
    found = {"summaries": forecast(3, 1.2, 1.31, 1.1), "lists": forecast(1, 1.08), "open chat": forecast(1, 1.04)}
    assert verdict(found) == "pays on summaries (×1.31 at k = 4), lists (×1.08 at k = 1); not on open chat"
    assert verdict({"open chat": forecast(1, 0.7)}) == "pays on none of these"
    assert verdict({"lists": forecast(2, 1.5)}) == "pays on lists (×1.50 at k = 2)"
