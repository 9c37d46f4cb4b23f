"""Who is tried apart, and which attempts count against a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.decode.attempts import unfinished
from services.decode.trials import Trials
from shared.messages import Attempt


def note(attempt: int, busy: bool = True, worker: str = "w") -> Attempt:
    return Attempt(attempt=attempt, worker=worker, life="l", busy=busy)


class TestUnfinished:
    def numbers(self, *notes: Attempt, stored: int = 0, before: int = 9) -> list[int]:
        return [n.attempt for n in unfinished(notes, stored, before)]

    def test_what_was_begun_and_never_taken_back_counts(self) -> None:
        assert self.numbers(note(1), note(2)) == [1, 2]

    def test_the_last_note_of_an_attempt_counts(self) -> None:
        assert self.numbers(note(1), note(1, busy=False), note(2, busy=False), note(2)) == [2]

    def test_a_stored_token_forgives_what_went_before_and_its_own_attempt(self) -> None:
        assert self.numbers(note(1), note(2), note(3), note(4), stored=3) == [4]

    def test_this_attempt_and_later_ones_do_not_count(self) -> None:
        assert self.numbers(note(1), note(2), note(3), before=2) == [1]

    def test_of_a_request_that_was_handed_over_the_one_who_took_it_is_named(self) -> None:
        assert [n.worker for n in unfinished([note(1, worker="a"), note(1, worker="b")], 0, 2)] == ["b"]


class TestTrials:
    def test_without_suspects_nobody_waits(self) -> None:
        trials = Trials()
        for key in "abc":
            trials.enter(key, suspect=False)
            assert trials.start() == [key]
        assert not trials.waiting

    def test_a_suspect_waits_for_those_without_a_token_and_they_for_it(self) -> None:
        trials = Trials()
        for key, suspect in {"a": False, "s": True, "b": False, "c": False}.items():
            trials.enter(key, suspect)
        assert trials.start() == ["a"]
        trials.leave("a")
        assert trials.start() == ["s"]
        assert trials.waiting
        trials.leave("s")
        assert trials.start() == ["b", "c"]

    @given(st.lists(st.one_of(st.booleans(), st.integers(0, 20)), max_size=60))
    def test_a_suspect_is_alone_and_everybody_has_a_turn(self, steps: list[bool | int]) -> None:
        """A bool enters a request, a number ends one of those that were entered."""
        trials, inside, entered = Trials(), dict[str, bool](), list[tuple[str, bool]]()
        started: list[str] = []

        def go() -> None:
            for key in trials.start():
                started.append(key)
                inside[key] = dict(entered)[key]
            assert len(inside) == 1 or not any(inside.values())

        for step in steps:
            if isinstance(step, bool):
                entered.append((str(len(entered)), step))
                trials.enter(*entered[-1])
            elif entered:
                key = entered[step % len(entered)][0]
                trials.leave(key)
                inside.pop(key, None)
            go()
        while inside:
            key = next(iter(inside))
            trials.leave(key)
            del inside[key]
            go()
        assert not trials.waiting
        assert started == sorted(started, key=int)
