"""When to ask again who found the queue full: from how full it is, and how fast requests leave it."""

from __future__ import annotations

import pytest

from services.decode.outflow import LATEST_S, SOONEST_S, WINDOW_S, Outflow


def flowing(rate: float, capacity: int = 10, seconds: float = 4.0) -> Outflow:
    """A full queue, seen every half second, that so many requests a second leave and as many join."""
    outflow = Outflow(capacity)
    for half in range(int(seconds * 2) + 1):
        outflow.look(half / 2, last_seq=capacity + int(rate * half / 2), there=capacity)
    return outflow


def test_the_rate_is_what_has_left_in_the_time_looked_at() -> None:
    assert flowing(4.0).rate == pytest.approx(4.0)
    slower = flowing(20.0, seconds=2)
    for second in range(3, 30):
        slower.look(float(second), last_seq=50 + second, there=10)
    assert slower.rate == pytest.approx(1.0)


def test_each_who_asks_is_told_the_next_place() -> None:
    outflow = flowing(4.0)
    assert [outflow.wait(4.0) for _ in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert outflow.wait(5.0) == pytest.approx(0.25), "the four have had theirs by now"


def test_two_who_tell_give_half_of_the_places_each() -> None:
    outflow = flowing(4.0)
    assert [outflow.wait(4.0, askers=2) for _ in range(2)] == pytest.approx([0.5, 1.0])


def test_room_that_is_there_is_given_away_first() -> None:
    outflow = flowing(4.0)
    outflow.look(4.5, last_seq=28, there=8)
    assert outflow.rate == pytest.approx(4.0, rel=0.2)
    assert [outflow.wait(4.5) for _ in range(2)] == [SOONEST_S, SOONEST_S]
    assert outflow.wait(4.5) == pytest.approx(0.25, rel=0.2)


def test_nobody_waits_longer_than_for_a_whole_queue_nor_than_the_limit() -> None:
    outflow = flowing(4.0)
    assert max(outflow.wait(4.0) for _ in range(1000)) == pytest.approx(11 / 4)
    stuck = flowing(0.0, seconds=WINDOW_S)
    assert stuck.wait(WINDOW_S) == pytest.approx(WINDOW_S)
    assert max(stuck.wait(WINDOW_S) for _ in range(100)) == LATEST_S


def test_without_a_rate_they_are_told_different_times_within_seconds() -> None:
    outflow = Outflow(10)
    outflow.look(0.0, last_seq=10, there=10)
    assert outflow.rate is None
    waits = [outflow.wait(0.0) for _ in range(10)]
    assert waits == sorted(waits) and waits[0] < 0.5 < waits[-1] <= 2.0


def test_that_none_has_left_means_little_at_first() -> None:
    outflow = flowing(0.0, seconds=1.0)
    assert outflow.rate is None
    outflow.look(1.5, last_seq=11, there=10)
    assert outflow.rate == pytest.approx(1 / 1.5)


def test_a_queue_that_was_lost_starts_anew() -> None:
    outflow = flowing(4.0)
    outflow.look(4.5, last_seq=3, there=3)
    assert outflow.rate is None
    outflow.look(5.5, last_seq=5, there=3)
    assert outflow.rate == pytest.approx(2.0)
