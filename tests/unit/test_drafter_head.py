"""The draft head as a source: chains from the hidden state told, many sessions a step, an end where it is not sure."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest

from services.drafter.record import Guess
from services.drafter.sessions import Session
from services.drafter.sources.base import Stepping, Wish
from services.drafter.sources.head import PRIORS, TRIED, HeadSource, kind_of, usable
from services.drafter.sources.model import ModelSource
from shared.messages import Sampling
from tests.fake_engine import HIDDEN, FakeEngine, completion, hidden_state
from tests.fake_head import FakeHead


def session(tokens: Sequence[int], name: str = "a/s", prompt_len: int = 0) -> Session:
    return Session(("w", name), list(tokens), prompt_len=prompt_len or len(tokens))


def wish(of: Session, k: int = 4, sampling: Sampling | None = None, hidden: bytes | None = None) -> Wish:
    length = len(of.tokens)
    told = hidden_state(length - 1, of.tokens[-1]) if hidden is None else hidden
    return Wish(of, of.tokens, length, k, sampling or Sampling(), told)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def run(source: HeadSource) -> bool:
    if (plan := source.plan()) is None:
        return False
    try:
        out, seconds = source.run(plan)
    except Exception as error:
        source.fail(plan, error)
    else:
        source.commit(plan, out, seconds)
    return True


def draft(source: HeadSource, *wishes: Wish) -> list[list[int]]:
    """Ask, wait, take."""
    for one in wishes:
        source.want(one, source.reach(one, 1))
    while any(source.waits(w) for w in wishes) and run(source):
        pass
    found = [source.ready(w) for w in wishes]
    for one, tokens in zip(wishes, found, strict=True):
        assert len(source.kinds(one, len(tokens))) == len(tokens)
        source.answered(one)
    return found


def test_it_is_what_the_service_asks_of_a_source() -> None:
    for source in (HeadSource(FakeHead()), ModelSource(FakeEngine())):
        taken: Stepping = source
        assert taken.step_s > 0


def test_a_chain_follows_the_state_told_and_then_its_own_guesses() -> None:
    source, one = HeadSource(FakeHead()), session(prompt(20))
    assert draft(source, wish(one)) == [completion(one.tokens, 4)]
    one.tokens += [*completion(one.tokens, 2), 77]
    assert draft(source, wish(one, k=6)) == [completion(one.tokens, 6)], "from what is true now, not what was guessed"


def test_sessions_step_together_and_leave_when_they_are_done() -> None:
    head = FakeHead()
    source, sessions = HeadSource(head), [session(prompt(10 + n, n), f"a/{n}") for n in range(3)]
    head.steps.clear()
    wishes = [wish(s, k) for s, k in zip(sessions, (1, 4, 3), strict=True)]
    assert draft(source, *wishes) == [completion(s.tokens, w.k) for s, w in zip(sessions, wishes, strict=True)]
    assert head.steps == [3, 2, 2, 1]
    assert source.plan() is None and not source.asked


def test_one_that_comes_later_joins_the_next_step() -> None:
    head = FakeHead()
    source, first, second = HeadSource(head), wish(session(prompt(10)), 3), wish(session(prompt(9, 1), "a/t"), 2)
    head.steps.clear()
    source.want(first, 3)
    assert run(source)
    source.want(second, 2)
    while run(source):
        pass
    assert head.steps == [1, 2, 2]
    assert [source.ready(w) for w in (first, second)] == [completion(w.tokens, w.k) for w in (first, second)]


@pytest.mark.parametrize(
    ("hidden", "good"),
    [
        (bytes(2 * HIDDEN), True), (b"", False), (bytes(2 * HIDDEN - 2), False), (bytes(2 * HIDDEN + 2), False),
        (bytes(2 * HIDDEN - 1), False), (struct.pack("<4e", 0, 1, 2, float("nan")), False),
        (struct.pack("<4e", 0, 1, 2, float("inf")), False), (struct.pack("<4e", 0, 1, 2, 65504.0), True),
    ],
)  # fmt: skip
def test_what_is_a_hidden_state(hidden: bytes, good: bool) -> None:
    assert usable(hidden, HIDDEN) is good


def test_without_a_hidden_state_there_is_no_room() -> None:
    source, one = HeadSource(FakeHead()), wish(session(prompt(10)), hidden=b"")
    assert (source.room(one), source.reach(one, 4), source.expected(one), source.behind(one)) == (0, 0, [], 0.0)
    assert draft(source, one) == [[]]
    assert not source.asked and source.plan() is None


def test_a_chain_ends_where_the_next_guess_would_hardly_be_reached() -> None:
    head = FakeHead(likely=0.45)
    source, one = HeadSource(head), session(prompt(10))
    chances = [PRIORS[kind_of(0.45, depth)] for depth in range(3)]
    assert chances[0] * chances[1] > 0.1 > chances[0] * chances[1] * chances[2]
    assert draft(source, wish(one, k=8)) == [completion(one.tokens, 2)]
    head.likely = 0.05
    assert draft(source, wish(one, k=8)) == [[]]


def test_what_was_never_sure_enough_is_tried_now_and_then() -> None:
    source, one = HeadSource(FakeHead(likely=0.01)), session(prompt(10))
    given = [draft(source, wish(one))[0] for _ in range(2 * TRIED)]
    assert [tokens for tokens in given if tokens] == [completion(one.tokens, 1)] * 2


def test_chances_are_learnt_by_confidence_and_depth() -> None:
    head = FakeHead(likely=0.65)
    source, other = HeadSource(head), session([1, 2], "a/other")
    before = draft(source, wish(other, k=16))
    head.likely = 0.45
    less_likely = draft(source, wish(other, k=16))
    head.likely = 0.65
    for n in range(40):  # it is always right
        one = session(prompt(10, n), f"a/{n}")
        asked = wish(one, k=16)
        [tokens] = draft(source, asked)
        source.record.learn(
            Guess("head", asked.length, tuple(tokens), tuple(kind_of(0.65, d) for d in range(len(tokens)))),
            [*one.tokens, *completion(one.tokens, 16)],
            one.fits["head"],
        )
    assert len(draft(source, wish(other, k=16))[0]) > len(before[0])
    head.likely = 0.45
    assert draft(source, wish(other, k=16)) == less_likely, "of such ones nothing was learnt"


def test_what_it_promises_before_it_has_guessed_is_what_its_chains_have_reached() -> None:
    head = FakeHead()
    source, one = HeadSource(head), session(prompt(10))
    sure = source.expected(wish(one, k=4))
    assert sure == sorted(sure) and len(sure) == 4
    head.likely = 0.25
    for n in range(60):
        draft(source, wish(session(prompt(9, n), f"a/{n}"), k=4))
    doubtful = source.expected(wish(one, k=4))
    assert doubtful[0] < 0.3 < sure[0]
    assert doubtful[3] == pytest.approx(doubtful[0], abs=0.02), "chains end after one guess"


def test_nothing_follows_an_end() -> None:
    one = session(prompt(12))
    third = completion(one.tokens, 3)[2]
    assert draft(HeadSource(FakeHead(eos_ids=frozenset([third]))), wish(one, k=8)) == [completion(one.tokens, 3)]


def test_penalties_and_floors_see_prompt_answer_and_guesses() -> None:
    head = FakeHead(eos_ids=frozenset([999]))
    sampling = Sampling(frequency_penalty=1.0, repetition_penalty=1.1, min_tokens=4, logit_bias={5: -100.0}, seed=3)
    source, one = HeadSource(head), session([7, 8, 9], prompt_len=2)
    draft(source, wish(one, 2, sampling))
    one.tokens += [9, 10]
    head.rows.clear()
    draft(source, wish(one, 3, sampling))
    assert [row.position for row in head.rows] == [5, 6, 7]
    assert {row.seed for row in head.rows} == {3}
    for depth, row in enumerate(head.rows):
        assert row.adjustments is not None
        counted = dict(zip(*row.adjustments.counts(row.guessed), strict=True))
        guessed = completion(one.tokens, 3)[:depth]
        assert counted == {7: 0, 8: 0, 9: 2, 10: 1, **dict.fromkeys(guessed, 1)}
        assert list(row.adjustments.bias_ids) == [5]
        assert list(row.adjustments.held_off(row.position)) == ([999] if row.position < 2 + 4 else [])
    one.tokens[:] = [7, 8]
    head.rows.clear()
    draft(source, wish(one, 1, Sampling()))
    assert head.rows[0].adjustments is None


def test_a_step_that_fails_costs_only_those_to_blame() -> None:
    head = FakeHead()
    source = HeadSource(head)
    good, bad = session(prompt(10)), session([*prompt(9, 1), 55], "a/bad")
    head.poison = 55
    assert draft(source, wish(good), wish(bad)) == [completion(good.tokens, 4), []]
    assert source.room(wish(bad)) == 0
    head.poison, head.banned = None, good.tokens[-1]
    again = session(prompt(8, 2), "a/third")
    assert draft(source, wish(good), wish(again)) == [[], completion(again.tokens, 4)]
    for one in (good, bad, again):
        source.end(one)
    assert source.plan() is None
    assert not (source._chains or source._adjusting or source._blame.barred or source._blame.suspects)


def test_the_newest_wish_counts_and_one_answered_early_stops() -> None:
    source, one = HeadSource(FakeHead()), session(prompt(10))
    old = wish(one)
    source.want(old, 4)
    assert run(source)
    one.tokens.append(5)
    new = wish(one)
    source.want(new, 4)
    assert not source.waits(old)
    assert run(source)
    assert (source.ready(old), source.ready(new)) == ([], completion(one.tokens, 1))
    source.answered(new)
    assert not source.waits(new) and source.plan() is None
