"""Any interleaving of duplicates, attempts and overlaps gives exactly the same tokens and text, once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import Unavailable
from shared.messages import Failed, Finished, ServedBy, Timings, Tokens, Usage
from shared.sampling.fields import Logprob
from trine.merge import Delta, EventMerger


class Answer:
    """A true answer: tokens, and for each number of tokens how much of the text is visible by then."""

    def __init__(self, pieces: list[str], flush: str) -> None:
        self.token_ids = [i * 7 % 5 for i in range(len(pieces))]  # repeats on purpose: position must decide, not value
        self.logprobs = [Logprob(logprob=-float(i)) for i in range(len(pieces))]
        self.visible = ["".join(pieces[:n]) for n in range(len(pieces) + 1)]
        self.flush = flush
        self.text = self.visible[-1] + flush

    def tokens(self, start: int, end: int, attempt: int) -> Tokens:
        text = self.visible[end][len(self.visible[start]) :]
        logprobs = self.logprobs[start:end]
        return Tokens(
            id="r", attempt=attempt, index=start, token_ids=self.token_ids[start:end], text=text, logprobs=logprobs
        )

    def last(self, attempt: int) -> list[Tokens | Finished]:
        n = len(self.token_ids)
        flush = [Tokens(id="r", attempt=attempt, index=n, token_ids=[], text=self.flush)] if self.flush else []
        return [*flush, finished(n, attempt)]


def finished(tokens: int, attempt: int = 1) -> Finished:
    usage = Usage(completion_tokens=tokens)
    return Finished(
        id="r", attempt=attempt, reason="stop", seed=1, usage=usage, timings=Timings(), served_by=ServedBy()
    )


@st.composite
def histories(draw: st.DrawFn) -> tuple[Answer, list[Tokens | Finished]]:
    """An answer and everything that may reach its client: the stream's chain, repeats, and stale workers' writes."""
    pieces = draw(st.lists(st.sampled_from(["", "a", "aa", "b", "é "]), min_size=0, max_size=12))
    answer = Answer(pieces, draw(st.sampled_from(["", "!", "aa"])))
    n = len(pieces)
    cuts = sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    edges = [0, *cuts, n] if n else [0]
    chain: list[Tokens | Finished] = []
    attempt = 1
    stale: list[Tokens | Finished] = []
    for start, end in pairwise(edges):
        if start and draw(st.booleans()):  # a worker took over here; the old one may have written on
            stop = draw(st.integers(start, n))
            stale.append(answer.tokens(start, stop, attempt))
            attempt += 1
        chain.append(answer.tokens(start, end, attempt))
    chain += answer.last(attempt)
    repeats = draw(st.lists(st.sampled_from(chain), max_size=8))
    return answer, draw(st.permutations([*chain, *repeats, *stale]))


@given(histories())
def test_everything_is_delivered_once_and_in_order(history: tuple[Answer, list[Tokens | Finished]]) -> None:
    answer, events = history
    merger = EventMerger()
    deltas = [delta for event in events for delta in merger.feed(event)]
    assert "".join(d.text for d in deltas) == answer.text == merger.text
    assert [t for d in deltas for t in d.token_ids] == answer.token_ids == merger.token_ids
    assert [p for d in deltas for p in d.logprobs] == answer.logprobs == merger.logprobs
    assert merger.terminal is not None
    assert not merger.missing
    position = 0
    for delta in deltas:
        assert delta.index == position
        position += len(delta.token_ids)


@given(histories(), st.integers(0, 30))
def test_nothing_is_final_while_tokens_are_missing(history: tuple[Answer, list[Tokens | Finished]], count: int) -> None:
    answer, events = history
    merger = EventMerger()
    for event in events[:count]:
        merger.feed(event)
        assert answer.text.startswith(merger.text)
        assert answer.token_ids[: len(merger.token_ids)] == merger.token_ids
        if merger.terminal is not None:
            assert len(merger.token_ids) == len(answer.token_ids)


def tokens(index: int, ids: list[int], text: str, attempt: int = 1) -> Tokens:
    return Tokens(id="r", attempt=attempt, index=index, token_ids=ids, text=text)


def test_a_gap_is_seen_and_filled() -> None:
    merger = EventMerger()
    assert merger.feed(tokens(0, [1], "a")) == [Delta("a", (1,), 0)]
    assert merger.feed(tokens(2, [3], "c")) == []
    assert merger.missing
    assert merger.feed(tokens(1, [2], "b")) == [Delta("b", (2,), 1), Delta("c", (3,), 2)]
    assert not merger.missing


def test_finished_tells_how_many_tokens_are_missing() -> None:
    merger = EventMerger()
    merger.feed(tokens(0, [1], "a"))
    merger.feed(finished(2))
    assert merger.missing and merger.terminal is None
    merger.feed(tokens(1, [2], "b"))
    assert merger.terminal is not None and merger.text == "ab"


def test_of_an_overlap_only_the_new_part_is_kept() -> None:
    merger = EventMerger()
    merger.feed(tokens(0, [1, 2], "ab"))
    merger.feed(tokens(2, [3, 4], "cd"))
    assert merger.feed(tokens(2, [3, 4, 5], "cde", attempt=2)) == [Delta("e", (5,), 4)]


def test_a_replaced_worker_that_writes_on_is_ignored() -> None:
    merger = EventMerger()
    merger.feed(tokens(0, [1], "a"))
    merger.feed(tokens(1, [2], "b", attempt=2))
    assert merger.feed(tokens(1, [9, 9], "zz", attempt=1)) == []
    for end in (finished(2, attempt=1), Failed(id="r", attempt=1, code="unavailable", message="gone")):
        assert merger.feed(end) == []
    assert merger.terminal is None and merger.text == "ab"


def test_words_of_an_attempt_that_the_stream_refused_do_not_hide_what_is_stored() -> None:
    """Attempt 2 was heard live but fenced off; attempt 1 went on, in other pieces, and ended the answer."""
    merger = EventMerger()
    merger.feed(tokens(0, [0, 1, 2], "abc"))
    merger.feed(tokens(3, [3, 4], "de", attempt=2))
    chain: list[Tokens | Finished] = [
        tokens(0, [0, 1, 2], "abc"),
        tokens(3, [3, 4, 5, 6], "defg"),
        tokens(7, [7], "h"),
        finished(8),
    ]
    assert merger.feed(chain[-1]) == []  # live and of a lower attempt: not believed yet
    for event in chain:
        merger.feed(event, stored=True)
    assert merger.text == "abcdefgh" and merger.terminal is not None


def test_a_stored_contradiction_is_an_error_not_a_mixture() -> None:
    merger = EventMerger()
    merger.feed(tokens(0, [0], "a"))
    merger.feed(tokens(1, [9], "z", attempt=2))
    with pytest.raises(Unavailable, match="contradicts"):
        merger.feed(tokens(1, [1], "b"), stored=True)


def test_a_later_attempt_that_says_something_else_is_an_error_not_a_mixture() -> None:
    merger = EventMerger()
    merger.feed(tokens(0, [1, 2], "ab"))
    with pytest.raises(Unavailable, match="contradicts"):
        merger.feed(tokens(0, [1, 3], "ac", attempt=2))


def test_a_failure_ends_the_answer_at_once() -> None:
    merger = EventMerger()
    merger.feed(tokens(2, [1], "a"))
    merger.feed(Failed(id="r", code="overloaded", message="full"))
    assert isinstance(merger.terminal, Failed)
