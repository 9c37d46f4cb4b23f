"""The suffix source: its index against a naive search, what it promises, what it remembers, what it costs."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.drafter.record import Guess
from services.drafter.sessions import Session
from services.drafter.sources.base import Wish
from services.drafter.sources.continuation import KINDS, PRIORS, Text, continuation, kind_of
from services.drafter.sources.history import History
from services.drafter.sources.suffix import AT_ONCE, PIECE, SuffixSource
from services.drafter.sources.suffix_index import BREAK, CANDIDATES, ENOUGH, GRAMS, LONGEST, Match, SuffixIndex
from shared.messages import Sampling

texts = st.lists(st.integers(0, 2), max_size=120)


def session(tokens: list[int], name: str = "a/s", prompt_len: int = 0, salt: str = "") -> Session:
    return Session(("w", name), list(tokens), prompt_len=prompt_len, salt=salt)


def wish(of: Session, k: int = 8, length: int | None = None) -> Wish:
    return Wish(of, of.tokens, len(of.tokens) if length is None else length, k, Sampling())


def settle(source: SuffixSource) -> SuffixSource:
    while source.behind:
        source.work()
    return source


def common(tokens: list[int], end: int, recent: list[int]) -> int:
    same = 0
    while same < min(end, len(recent)) and tokens[end - 1 - same] == recent[-1 - same]:
        same += 1
    return same


def naive_matches(tokens: list[int], recent: list[int], before: int) -> list[Match]:
    ends = [(common(tokens, end, recent), end) for end in range(before - 1, 0, -1)]
    for least in GRAMS:
        found = [m for m in ends if m[0] >= least]
        if found:
            whole = [i for i, (same, _) in enumerate(found) if same == LONGEST]
            cut = whole[ENOUGH - 1] + 1 if len(whole) >= ENOUGH else CANDIDATES
            return sorted(found[: min(cut, CANDIDATES)], reverse=True)
    return []


class TestIndex:
    @settings(max_examples=600, deadline=None)
    @given(texts, st.integers(0, 2**16))
    def test_finds_what_a_naive_search_finds_however_the_text_came(self, tokens: list[int], seed: int) -> None:
        rng, grown = random.Random(seed), list[int]()
        index = SuffixIndex(grown)
        while len(grown) < len(tokens):
            grown += tokens[len(grown) : len(grown) + rng.randrange(1, 9)]
            index.follow(len(grown) if rng.random() < 0.7 else rng.randrange(index.known, len(grown) + 1))
            recent = grown[-LONGEST:]
            if index.known == len(grown):
                assert index.matches(recent, len(grown)) == naive_matches(grown, recent, len(grown))

    @settings(max_examples=400, deadline=None)
    @given(st.lists(texts, max_size=6), texts, st.integers(0, 2**16))
    def test_several_texts_of_which_the_first_tokens_leave(
        self, parts: list[list[int]], recent: list[int], seed: int
    ) -> None:
        rng, index = random.Random(seed), SuffixIndex([])
        kept: list[int] = []
        for part in parts:
            for token in part:
                index.tokens.append(token)
                if rng.random() < 0.3:
                    index.follow(len(index.tokens))
            index.follow(len(index.tokens))
            index.part()
            kept += [*part, BREAK]
            gone = rng.randrange(len(kept) + 1) if rng.random() < 0.5 else 0
            index.forget(gone)
            del kept[:gone]
            assert index.tokens == kept
            found = index.matches(recent[-LONGEST:], index.known)
            assert found == naive_matches(kept, recent[-LONGEST:], len(kept))

    def test_what_has_left_leaves_nothing_behind(self) -> None:
        rng, index = random.Random(0), SuffixIndex([])
        for _ in range(50):
            index.tokens += [rng.randrange(500) for _ in range(100)]
            index.part()
            index.forget(max(index.known - 300, 0))
        index.forget(index.known)
        assert not index.tokens
        assert all(not chain.last and not chain.before for chain in index._chains)


class TestContinuation:
    def path(self, tokens: list[int], k: int = 8) -> tuple[int, ...]:
        index = SuffixIndex(tokens)
        index.follow(len(tokens))
        found = index.matches(tokens[-LONGEST:], len(tokens))
        return continuation(Text(tokens, len(tokens), loops=True), found, k, PRIORS.__getitem__, 0.1).token_ids

    def test_the_longest_match_counts_more_than_many_short_ones(self) -> None:
        tokens = [*[9, 3, 60] * 6, 1, 2, 5, 6, 3, 50, 51, 52, 8, 8, 1, 2, 5, 6, 3]
        assert self.path(tokens, 1) == (50,)

    def test_of_equal_matches_the_more_frequent_continuation_counts(self) -> None:
        tokens = [7, 2, 3, 50, 8, 2, 3, 50, 5, 2, 3, 60, 9, 2, 3]
        assert self.path(tokens, 1) == (50,)

    def test_of_equally_frequent_ones_the_most_recent(self) -> None:
        assert self.path([7, 2, 3, 50, 8, 2, 3, 60, 9, 2, 3], 1) == (60,)

    def test_a_loop_is_continued_beyond_its_end(self) -> None:
        assert self.path([4, 5, 4, 5, 4, 5, 4, 5], 5) == (4, 5, 4, 5, 4)

    def test_no_match_no_draft(self) -> None:
        assert self.path(list(range(20))) == ()
        assert self.path([1]) == ()

    def test_better_matches_make_longer_drafts(self) -> None:
        rng = random.Random(0)
        once = [rng.randrange(10**6) for _ in range(60)]
        lengths = [len(self.path([*once, *once[:match]], 64)) for match in (1, 3, 8, 24)]
        assert lengths == sorted(lengths)
        assert lengths[0] < 3
        assert lengths[3] > 12

    def test_but_not_when_such_matches_kept_failing(self) -> None:
        tokens = [1, 2, 3, 4, 60, *[8, 3, 4, 50] * 3, 9, 1, 2, 3, 4]
        index = SuffixIndex(tokens)
        index.follow(len(tokens))
        found = index.matches(tokens[-LONGEST:], len(tokens))
        for trust, token in ((0.9, 60), (0.1, 50)):
            chance = defaultdict(lambda: 0.5, {kind_of(4, 1, 1): trust})
            path = continuation(Text(tokens, len(tokens), loops=True), found, 1, chance.__getitem__, 0.1)
            assert path.token_ids == (token,)

    @given(texts, st.integers(1, 10))
    def test_expects_what_its_kinds_promise(self, tokens: list[int], k: int) -> None:
        index = SuffixIndex(tokens)
        index.follow(len(tokens))
        found = index.matches(tokens[-LONGEST:], len(tokens))
        path = continuation(Text(tokens, len(tokens), loops=True), found, k, PRIORS.__getitem__, 0.1)
        through, expected = 1.0, 0.0
        for kind in path.kinds:
            through *= PRIORS[kind]
            expected += through
            assert through >= 0.1
        assert path.expected == pytest.approx(expected)
        assert len(path.token_ids) == len(path.kinds) <= k

    def test_kinds_are_all_told_apart(self) -> None:
        votes = [(1, 1), (2, 2), (2, 3), (1, 3)]
        assert {kind_of(match, a, b) for match in range(1, 40) for a, b in votes} == set(range(KINDS))


class TestHistory:
    def work(self, history: History) -> None:
        while history.waiting:
            history.work(50)

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), max_size=30), st.integers(0, 2**16))
    def test_never_more_than_its_capacity_and_the_newest_stay(self, added: list[tuple[int, int]], seed: int) -> None:
        rng, history = random.Random(seed), History(1000)
        newest: dict[tuple[str, str], list[int]] = {}
        for tenant, length in added:
            scope, output = (str(tenant), ""), [rng.randrange(10**6) for _ in range(length)]
            history.add(scope, output)
            assert history.waiting <= 1000
            if rng.random() < 0.5:
                self.work(history)
            assert len(history) <= 1000
            assert len(history) == sum(len(i.tokens) for i in history._indexes.values())
            if length >= LONGEST:
                newest[scope] = output
        self.work(history)
        if added and (scope := (str(added[-1][0]), "")) in newest and added[-1][1] >= LONGEST:
            index = history._indexes[scope]
            kept = min(len(newest[scope]), 180)  # each of four may keep a quarter, but for a portion
            assert index.tokens[-1 - kept : -1] == newest[scope][-kept:]

    def test_whoever_has_much_makes_room_not_who_has_little(self) -> None:
        history = History(1000)
        small = list(range(100))
        history.add(("small", ""), small)
        for n in range(20):
            history.add(("large", ""), list(range(1000 * n, 1000 * n + 200)))
            self.work(history)
        assert history._indexes["small", ""].tokens[:-1] == small

    def test_many_scopes_are_not_kept_for_ever(self) -> None:
        history = History(100_000)
        for n in range(600):
            history.add((f"t{n}", ""), list(range(40)))
            self.work(history)
        assert len(history._indexes) == 256
        assert ("t599", "") in history._indexes
        assert len(history) == 256 * 41

    def test_without_capacity_nothing_is_kept(self) -> None:
        history = History(0)
        history.add(("a", ""), list(range(100)))
        assert history.waiting == 0


class TestSource:
    PAST = tuple(random.Random(7).sample(range(1000, 10**6), 200))

    def ended(self, name: str = "a/old", salt: str = "") -> SuffixSource:
        source = SuffixSource(10_000)
        source.end(session([1, 2, 3, *self.PAST], name, prompt_len=3, salt=salt))
        return settle(source)

    def test_a_past_output_of_the_same_tenant_is_continued(self) -> None:
        new = session([5, 5, 9, *self.PAST[40:50]], "a/new")
        found = self.ended().draft(wish(new))
        assert found.token_ids == self.PAST[50:58]
        assert all(kind >= KINDS for kind in found.kinds)

    def test_the_same_question_finds_its_answer(self) -> None:
        prompt = list(range(50))
        source = SuffixSource(10_000)
        source.end(session([*prompt, *self.PAST], prompt_len=50))
        assert settle(source).draft(wish(session(prompt))).token_ids == self.PAST[:8]

    @pytest.mark.parametrize(
        ("name", "salt", "finds"),
        [("a/new", "", True), ("b/new", "", False), ("a/new", "x", False), ("a", "", True), ("aa/new", "", False)],
    )
    def test_scopes_are_apart(self, name: str, salt: str, finds: bool) -> None:
        new = session(list(self.PAST[40:50]), name, salt=salt)
        assert bool(self.ended().draft(wish(new)).token_ids) is finds

    def test_and_so_the_other_way_round(self) -> None:
        new = session(list(self.PAST[40:50]))
        assert not self.ended("b/old").draft(wish(new)).token_ids
        assert not self.ended(salt="x").draft(wish(new)).token_ids

    def test_the_prompt_itself_is_nobody_elses(self) -> None:
        source = SuffixSource(10_000)
        source.end(session([*self.PAST, *range(40)], prompt_len=200))
        new = session(list(self.PAST[40:50]))
        assert not settle(source).draft(wish(new)).token_ids

    @given(st.lists(st.integers(0, 3), min_size=3, max_size=60), st.integers(0, 2**16))
    def test_kept_up_to_date_equals_built_anew(self, tokens: list[int], seed: int) -> None:
        rng, kept, told = random.Random(seed), SuffixSource(0), session([])
        for end in range(1, len(tokens) + 1):
            if rng.random() < 0.2:  # told anew, differently, and then again as it was
                told.tokens = [rng.randrange(4) for _ in range(rng.randrange(1, end + 3))]
                kept.draft(wish(told))
                told.tokens = tokens[:end]
            else:
                told.tokens.append(tokens[end - 1])
            fresh = SuffixSource(0).draft(wish(session(tokens[:end])))
            assert kept.draft(wish(told)) == fresh

    def test_a_long_prompt_is_taken_in_a_piece_at_a_time(self) -> None:
        """The event loop is never held up by it, and drafts are found in what has been taken in."""
        source, rng = SuffixSource(0), random.Random(0)
        tokens = [rng.randrange(10**6) for _ in range(8000)]
        long = session([*tokens, *tokens[300:310]])
        assert not source.draft(wish(long)).token_ids
        pieces = 0
        while source.behind:
            before = source._indexed
            source.work()
            pieces += 1
            assert source._indexed - before <= PIECE
            assert bool(source.draft(wish(long)).token_ids) is (source._indexed > 310)
        assert pieces == -(-8010 // PIECE)
        long.tokens += tokens[310 : 310 + AT_ONCE]
        assert source.draft(wish(long)).token_ids
        assert not source.behind

    def test_the_cost_of_a_draft_does_not_grow_with_the_sequence(self) -> None:
        rng = random.Random(0)
        for tokens in ([rng.randrange(50) for _ in range(8000)], [1, 2, 3] * 3000, [7] * 8000):
            source, long = SuffixSource(0), session([])
            watched = long.tokens = Watched(tokens)
            source.draft(wish(long))
            settle(source)
            assert watched.read <= 12 * len(tokens)
            watched.read = 0
            for _ in range(10):
                watched.append(7)
                source.draft(wish(long))
            assert watched.read / 10 < 3000

    def test_indexes_of_all_sessions_together_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("services.drafter.sources.suffix.INDEXED_TOKENS", 1000)
        source = SuffixSource(0)
        sessions = [session([n] * 300, f"a/{n}") for n in range(9)]
        for one in sessions:
            source.draft(wish(one))
            settle(source)
            assert source._indexed == sum(i.known for i in source._indexes.values()) <= 1000
        assert list(source._indexes) == sessions[-3:]
        for one in sessions:
            source.end(one)
        assert source._indexed == 0

    def test_kinds_that_keep_failing_are_drafted_no_more(self) -> None:
        source = SuffixSource(0)
        one = session([1, 2, 3, 4, 1, 2, 3])
        for _ in range(200):
            found = source.draft(wish(one, 1))
            if not found.token_ids:
                return
            guess = Guess("suffix", 3, found.token_ids, found.kinds)
            source.record.learn(guess, [0, 0, 0, 9], one.fits["suffix"])
        pytest.fail("still promised")


class Watched(list[int]):
    """Counts the tokens that are read from it."""

    read = 0

    def __getitem__(self, where):
        found = super().__getitem__(where)
        self.read += len(found) if isinstance(where, slice) else 1
        return found

    def __iter__(self):
        self.read += len(self)
        return super().__iter__()
