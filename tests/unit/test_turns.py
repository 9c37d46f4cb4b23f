"""Whose queue is pulled next: the highest first, but with a bounded share for the lower ones."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.decode.turns import SHARE, Turns
from shared.subjects import PRIORITIES


class Worker:
    """Three pull loops on queues with `waiting` messages; room for one request at a time."""

    def __init__(self, **waiting: int) -> None:
        self.turns = Turns(PRIORITIES)
        self.waiting = waiting
        self.taken: list[str] = []

    def take(self) -> str | None:
        """All loops ask, the lowest first, until one of them has pulled a request. None if all are dry."""
        dry: list[str] = []
        for _ in range(3):  # a loop that found its queue dry lets the next ones go on
            for priority in reversed(PRIORITIES):
                if priority in dry or not self.turns.may_pull(priority):
                    continue
                if self.waiting.get(priority):
                    self.waiting[priority] -= 1
                    self.taken.append(priority)
                    self.turns.over(priority, 1)
                    self._end(dry)
                    return priority
                self.turns.dry(priority)
                dry.append(priority)
        self._end(dry)
        return None

    def _end(self, dry: list[str]) -> None:
        for priority in dry:
            self.turns.over(priority, 0)


def test_under_an_endless_load_each_lower_queue_has_its_share() -> None:
    worker = Worker(high=1000, normal=1000, low=1000)
    for _ in range(100):
        worker.take()
    assert Counter(worker.taken) == {"high": 80, "normal": 10, "low": 10}
    assert worker.taken[:8] == ["high"] * 8


def test_one_low_request_is_taken_after_a_bounded_number_of_higher_ones() -> None:
    worker = Worker(high=1000, low=1)
    for _ in range(SHARE + 2):
        worker.take()
    assert worker.taken.count("low") == 1


def test_without_higher_ones_the_lower_ones_wait_for_nothing() -> None:
    worker = Worker(normal=2, low=3)
    assert [worker.take() for _ in range(6)] == ["normal", "normal", "low", "low", "low", None]


def test_the_others_wait_while_a_late_queue_is_pulled() -> None:
    turns = Turns(PRIORITIES, share=1)
    assert not turns.may_pull("low")
    assert turns.may_pull("high")
    turns.over("high", 1)
    assert not turns.may_pull("high")
    assert turns.may_pull("low")
    assert not turns.may_pull("high")
    turns.over("low", 0)  # the bus was gone
    assert turns.may_pull("high")


def test_who_was_handed_back_is_next() -> None:
    turns = Turns(PRIORITIES)
    turns.over("low", 1)
    turns.handed_back("low")
    assert turns.may_pull("low")
    assert not turns.may_pull("high")


def test_a_loop_that_is_busy_with_a_request_holds_up_nobody() -> None:
    turns = Turns(PRIORITIES, share=1)
    for _ in range(10):  # the low loop does not ask
        assert turns.may_pull("high")
        turns.over("high", 1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(PRIORITIES), st.integers(0, 60)))
def test_everything_is_taken_and_nobody_waits_longer_than_its_bound(waiting: dict[str, int]) -> None:
    worker = Worker(**waiting)
    left, since = dict(waiting), Counter[str]()
    while (taken := worker.take()) is not None:
        left[taken] -= 1
        for priority in PRIORITIES[1:]:
            since[priority] = 0 if taken == priority or not left.get(priority) else since[priority] + 1
            assert since[priority] <= SHARE + 2
    assert not any(left.values())
