"""How long another worker's blocks are waited for: by what came of it, and by what else it gets done."""

from __future__ import annotations

from collections.abc import Sequence

from shared.patience import PATIENCES, TURNS, Patience

LIMIT = 5.0


def given_up(done: Sequence[int | None], *, worker: str = "p", block_at: int | None = None) -> int | None:
    """The second in which the patience ends; `done`: what the worker says second by second that it has computed."""
    patience = Patience(LIMIT, 0.0, 0.0)
    for second, count in enumerate(done):
        patience.hear(worker, {} if count is None else {"p": count, "q": 1000 * second}, float(second))
        if second == block_at:
            patience.progress = float(second)
        if patience.over(float(second)):
            return second
    return None


def test_a_dead_or_stuck_worker_costs_one_patience() -> None:
    assert given_up([None] * 60) == given_up([512] * 60) == given_up([0] * 60) == 6
    assert given_up([256 * n for n in range(60)], worker="") == 6  # nobody knows whether it has the job
    assert given_up([None] * 60, block_at=3) == 9
    assert given_up([0, 256, 512, *[512] * 60]) == given_up([0, 256, 512, *[None] * 60]) == 8  # it gets stuck later


def test_one_that_takes_turns_is_waited_for_as_long_as_it_gets_on() -> None:
    slow = [256 * (second // 4) for second in range(60)]
    assert given_up(slow[:33]) is None
    assert given_up(slow) == TURNS * LIMIT + 1  # but not for ever
    assert given_up(slow, block_at=30) is None
    assert given_up([256 * (second // 7) for second in range(60)]) == 6


def test_what_was_done_before_does_not_count_nor_what_nobody_was_asked_for() -> None:
    patience = Patience(LIMIT, 0.0, 0.0)
    patience.hear("", {"p": 900}, 0.0)
    patience.hear("p", {"p": 900, "q": 300}, 1.0)  # now it is known who has the job
    patience.hear("p", {"p": 900, "q": 600}, 2.0)
    patience.hear("q", {"p": 900, "q": 600}, 3.0)
    patience.hear("q", {"p": 900, "q": 0}, 4.0)  # it was started again
    assert patience.over(LIMIT + 0.1)
    patience.hear("q", {"p": 900, "q": 1}, 6.0)
    assert not patience.over(11.0)


def test_who_takes_the_job_is_judged_by_what_it_did_meanwhile() -> None:
    patience = Patience(LIMIT, 0.0, 0.0)
    patience.hear("", {"p": 100}, 0.0)
    patience.hear("p", {"p": 200}, 4.0)
    assert not patience.over(9.0)


def test_all_of_several_leaders_together() -> None:
    patience = Patience(LIMIT, 0.0, 0.0)
    for leader in range(1, int(TURNS * LIMIT)):
        patience.follow(leader, float(leader))
        assert not patience.over(float(leader))
        assert patience.quite_over(float(leader)) == (leader > PATIENCES * LIMIT)
