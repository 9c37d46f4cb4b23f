"""Cancels are remembered for what was queued before them, and for nothing else."""

from __future__ import annotations

from shared.cancels import REMEMBERED, SLACK_S, Cancels


def test_a_cancel_covers_what_was_queued_before_it() -> None:
    cancels = Cancels()
    cancels.note("a", 100.0)
    assert cancels.covers("a", 90.0)
    assert not cancels.covers("b", 90.0)


def test_an_id_used_again_after_its_cancel_is_not_cancelled() -> None:
    cancels = Cancels()
    cancels.note("a", 100.0)
    assert cancels.covers("a", 100.0 + SLACK_S)
    assert not cancels.covers("a", 100.1 + SLACK_S)


def test_the_latest_cancel_of_an_id_counts() -> None:
    cancels = Cancels()
    cancels.note("a", 100.0)
    cancels.note("a", 200.0)
    assert cancels.covers("a", 150.0)


def test_the_oldest_are_forgotten_first_and_a_repeat_makes_one_young() -> None:
    cancels = Cancels()
    for number in range(REMEMBERED):
        cancels.note(str(number), 1.0)
    cancels.note("0", 2.0)
    cancels.note("new", 2.0)
    assert cancels.covers("0", 0.0)
    assert cancels.covers("new", 0.0)
    assert not cancels.covers("1", 0.0)
    assert cancels.covers("2", 0.0)
