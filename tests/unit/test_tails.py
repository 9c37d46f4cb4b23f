"""The book of raw keys that slots hold: it never lets a span read keys that were overwritten or never written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.span import Span
from shared.engine.tails import TailBook
from shared.errors import InvalidField

B, LOOKAHEAD = 4, 3
RING = B + LOOKAHEAD


def span(start: int, length: int, slot: int = 0) -> Span:
    return Span((1,) * length, start, tuple(range(64)), slot=slot)


def step(book: TailBook, *spans: Span) -> None:
    book.check(spans)
    book.wrote(spans)


def test_a_sequence_that_goes_on_where_it_was() -> None:
    book = TailBook(RING, B)
    for start, length in [(0, 1), (1, 6), (7, 1), (8, 30), (38, 2), (40, 9), (49, 1)]:
        step(book, span(start, length))


@pytest.mark.parametrize("start", [1, 3, 5, 127])
def test_a_slot_that_holds_nothing(start: int) -> None:
    with pytest.raises(InvalidField, match=f"span 0 starts at {start}, but slot 0 holds 0 to 0") as caught:
        TailBook(RING, B).check([span(start, 1)])
    assert caught.value.field == "slot"


def test_the_beginning_of_a_block_needs_nothing() -> None:
    TailBook(RING, B).check([span(8, 3)])


def test_slots_are_kept_apart() -> None:
    book = TailBook(RING, B)
    step(book, span(0, 6, 0), span(0, 9, 1))
    with pytest.raises(InvalidField, match=r"span 1 .* slot 2"):
        book.check([span(6, 1, 0), span(9, 1, 2)])
    with pytest.raises(InvalidField, match=r"span 0 .* slot 0"):
        book.check([span(9, 1, 0)])
    step(book, span(9, 1, 1), span(6, 1, 0))


def test_a_gap_is_refused() -> None:
    book = TailBook(RING, B)
    step(book, span(0, 6))
    with pytest.raises(InvalidField, match="starts at 7, but slot 0 holds 0 to 6"):
        book.check([span(7, 1)])


def test_going_back_further_than_promised_is_refused() -> None:
    book = TailBook(RING, B)
    step(book, span(0, 19))  # holds 12 to 19
    for start in (15, 16, 18, 19):
        book.check([span(start, 1)])
    for start in (11, 9):
        with pytest.raises(InvalidField, match="holds 12 to 19"):
            book.check([span(start, 1)])


def test_another_sequence_in_the_slot_begins_anew() -> None:
    book = TailBook(RING, B)
    step(book, span(0, 19))
    step(book, span(0, 2))
    with pytest.raises(InvalidField, match="holds 0 to 2"):
        book.check([span(18, 1)])


def test_a_step_that_failed_changes_nothing() -> None:
    book = TailBook(RING, B)
    step(book, span(0, 6))
    book.check([span(6, 5)])  # and no `wrote`
    step(book, span(6, 2))
    step(book, span(8, 1))


@given(
    moves=st.lists(st.tuples(st.integers(1, 12), st.integers(0, LOOKAHEAD + 2)), min_size=1, max_size=40),
    block_size=st.integers(1, 9),
    lookahead=st.integers(0, 5),
)
def test_what_is_let_through_is_really_there(moves: list[tuple[int, int]], block_size: int, lookahead: int) -> None:
    """Against the ring itself. A sequence that keeps its promise is never refused."""
    ring = lookahead + block_size
    book, rows, at, longest = TailBook(ring, block_size), dict[int, int](), 0, 0
    for length, back in moves:
        start = max(at - back, 0)
        need = range(start - start % block_size, start)
        there = all(rows.get(p % ring) == p for p in need)
        try:
            book.check([span(start, length)])
        except InvalidField:
            assert back > min(lookahead, longest - 1)
            continue
        assert there
        at, longest = start + length, length
        for position in range(start, at):
            rows[position % ring] = position
        book.wrote([span(start, length)])
