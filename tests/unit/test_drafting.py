"""Drafter sessions, prompt lookup, source scores, and the decode worker's side of drafting."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from services.decode.sequence import Sequence
from services.decode.speculation import MISSES_TO_PAUSE, DraftBook
from services.drafter.scheduler import PROBE_EVERY, SourceScore, record_outcome
from services.drafter.sessions import Session, SessionTable
from services.drafter.sources.base import Wish
from services.drafter.sources.lookup import Lookup
from services.drafter.sources.model import ModelSource, common_prefix
from shared.cache.naming import Lineage
from shared.lifecycle import Phase
from shared.messages import Draft, Sampling
from tests.fake_engine import FakeEngine, completion


def wish(session: Session, k: int = 4) -> Wish:
    return Wish(session, session.tokens, len(session.tokens), k, Sampling(), 10.0)


def sequence(tokens: list[int], max_tokens: int = 50, name: str = "s") -> Sequence:
    made = Sequence(name, list(tokens), len(tokens), Lineage(b"r" * 32, "default"), max_tokens, Sampling(), 7)
    made.phase = Phase.READY
    made.computed = len(tokens) - 1
    return made


class TestLookup:
    def test_continues_the_longest_match(self) -> None:
        session = Session(("d", "s"), [1, 2, 3, 50, 51, 9, 2, 3, 60, 61, 8, 1, 2, 3])
        assert Lookup(2).draft([wish(session)]) == [[50, 51, 9, 2]]

    def test_of_equal_matches_the_most_recent_counts(self) -> None:
        session = Session(("d", "s"), [7, 2, 3, 50, 8, 2, 3, 60, 9, 2, 3])
        assert Lookup(2).draft([wish(session, 1)]) == [[60]]

    def test_no_match_no_draft(self) -> None:
        assert Lookup(2).draft([wish(Session(("d", "s"), list(range(20))))]) == [[]]
        assert Lookup(2).draft([wish(Session(("d", "s"), [1]))]) == [[]]

    def test_a_loop_is_continued_beyond_its_end(self) -> None:
        assert Lookup(2).draft([wish(Session(("d", "s"), [4, 5, 4, 5]), 5)]) == [[4, 5, 4, 5, 4]]

    @given(st.lists(st.integers(0, 3), min_size=3, max_size=60), st.integers(0, 2**16))
    def test_index_kept_up_to_date_equals_index_built_anew(self, tokens: list[int], seed: int) -> None:
        rng = random.Random(seed)
        kept, table = Lookup(2), SessionTable(1)
        for end in range(1, len(tokens) + 1):
            base, told = end - 1, tokens[end - 1 : end]
            if rng.random() < 0.2:  # a session told anew from an earlier point, and then again as it was
                base = rng.randrange(end)
                table.update(("d", "s"), base, [rng.randrange(4)])
                told = tokens[base:end]
            session = table.update(("d", "s"), base, told)
            assert session is not None and session.tokens == tokens[:end]
            fresh = Lookup(2).draft([wish(Session(("d", "f"), list(session.tokens)))])
            assert kept.draft([wish(session)]) == fresh


class TestSessions:
    def test_updates_extend_and_roll_back(self) -> None:
        table = SessionTable(4)
        session = table.update(("d", "s"), 0, [1, 2, 3])
        assert session is not None
        table.update(("d", "s"), 3, [4, 5])
        assert session.tokens == [1, 2, 3, 4, 5]
        table.update(("d", "s"), 2, [9])
        assert session.tokens == [1, 2, 9]

    def test_a_list_handed_out_only_grows(self) -> None:
        table = SessionTable(4)
        session = table.update(("d", "s"), 0, [1, 2, 3])
        assert session is not None
        first = session.tokens
        table.update(("d", "s"), 0, [1, 2, 3])  # told again, as after a lost answer
        table.update(("d", "s"), 1, [2, 3, 4])
        assert session.tokens is first == [1, 2, 3, 4]
        table.update(("d", "s"), 0, [1, 2])
        assert session.tokens == [1, 2]
        table.update(("d", "s"), 1, [9])
        assert session.tokens == [1, 9]
        assert first == [1, 2, 3, 4]

    def test_a_base_beyond_what_is_known_is_unknown(self) -> None:
        table = SessionTable(4)
        assert table.update(("d", "s"), 3, [4]) is None
        table.update(("d", "s"), 0, [1])
        assert table.update(("d", "s"), 2, [4]) is None

    def test_the_least_recently_asked_about_goes_first(self) -> None:
        table = SessionTable(2)
        for name in "abc":
            table.update(("d", name), 0, [1])
            table.update(("d", "a"), 0, [1])
        assert [s.key[1] for s in table.overflow()] == ["b"]

    def test_workers_do_not_share_sessions(self) -> None:
        table = SessionTable(4)
        table.update(("d1", "s"), 0, [1, 2])
        assert table.update(("d2", "s"), 2, [3]) is None


class TestModelSource:
    def test_drafts_are_the_models_own_continuation_also_after_a_rollback(self) -> None:
        source = ModelSource(FakeEngine(), within_budget=False)
        session = Session(("d", "s"), [3, 1, 4, 1, 5])
        assert source.draft([wish(session)]) == [completion(session.tokens, 4)]
        session.tokens += [77]  # the target took something else
        assert source.draft([wish(session)]) == [completion(session.tokens, 4)]
        session.tokens += completion(session.tokens, 3)  # and then followed the drafts
        assert source.draft([wish(session)]) == [completion(session.tokens, 4)]

    def test_sessions_are_drafted_in_one_batch(self) -> None:
        engine = FakeEngine()
        source = ModelSource(engine, within_budget=False)
        sessions = [Session(("d", str(n)), [n] * (n + 1)) for n in range(5)]
        before = engine.steps
        assert source.draft([wish(s, 3) for s in sessions]) == [completion(s.tokens, 3) for s in sessions]
        assert engine.steps == before + 3

    def test_a_full_pool_costs_the_oldest_session_its_kv_only(self) -> None:
        source = ModelSource(FakeEngine(blocks=8), within_budget=False)
        for number in range(6):
            session = Session(("d", str(number)), [number] * 9)
            assert source.draft([wish(session)]) == [completion(session.tokens, 4)]

    def test_never_beyond_the_context(self) -> None:
        source = ModelSource(FakeEngine(context=12), within_budget=False)
        assert [len(d) for d in source.draft([wish(Session(("d", "s"), [1] * 10))])] == [2]
        assert source.draft([wish(Session(("d", "t"), [1] * 12))]) == [[]]

    @given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40), st.integers(0, 40))
    def test_common_prefix(self, a: list[int], b: list[int], shared: int) -> None:
        b = a[:shared] + b
        equal = [x == y for x, y in zip(a, b, strict=False)]
        assert common_prefix(a, b) == (equal.index(False) if False in equal else len(equal))


class TestScores:
    def test_a_source_that_is_wrong_is_left_out_and_probed(self) -> None:
        score = SourceScore()
        for _ in range(100):
            score.record(False)
        assert sum(score.worth_trying() for _ in range(PROBE_EVERY * 3)) == 3
        for _ in range(20):
            score.record(True)
        assert score.worth_trying()

    def test_the_outcome_is_compared_once_the_token_is_known(self) -> None:
        scores = {"x": SourceScore()}
        session = Session(("d", "s"), [1, 2])
        session.guessed = (2, (5,), "x")
        record_outcome(session, scores)
        assert scores["x"].seen == 0
        session.tokens.append(5)
        record_outcome(session, scores)
        record_outcome(session, scores)
        assert scores["x"].seen == 1
        assert scores["x"].rate > 0.5


class TestDraftBook:
    def test_tells_each_token_once(self) -> None:
        book, seq = DraftBook(4, 1000), sequence([1, 2, 3])
        assert book.asks([seq], ["d1"])["d1"][0].token_ids == [1, 2, 3]
        seq.tokens.append(4)
        item = book.asks([seq], ["d1"])["d1"][0]
        assert (item.base, item.token_ids) == (3, [4])

    def test_tells_everything_again_to_another_drafter_or_when_asked_to(self) -> None:
        book, seq = DraftBook(4, 1000), sequence([1, 2, 3])
        book.asks([seq], ["d1"])
        assert book.asks([seq], ["d2"])["d2"][0].base == 0
        book.unknown(["s"])
        assert book.asks([seq], ["d2"])["d2"][0].base == 0

    def test_never_asks_for_more_than_may_be_generated(self) -> None:
        book = DraftBook(4, 1000)
        assert book.asks([sequence([1], max_tokens=3)], ["d"])["d"][0].k == 2
        assert book.asks([sequence([1], max_tokens=1, name="t")], ["d"]) == {}

    def test_stale_forged_and_oversized_answers_are_ignored(self) -> None:
        book, seq = DraftBook(4, 1000), sequence([1, 2, 3])
        assert not book.take(seq, Draft(session="s", position=2, token_ids=[1], source="x"))
        assert not book.take(seq, Draft(session="s", position=3, token_ids=[1000], source="x"))
        assert not seq.drafts
        assert book.take(seq, Draft(session="s", position=3, token_ids=list(range(30)), source="x"))
        assert list(seq.drafts) == [0, 1, 2, 3]

    def test_a_drafter_that_misses_is_paused_ever_longer_and_forgiven_at_once(self) -> None:
        book, seq = DraftBook(4, 1000), sequence([1, 2, 3])
        asked = 0
        for _ in range(200):
            book.next_step()
            if book.asks([seq], ["d"]):
                asked += 1
                book.missed("d", ["s"])
        assert MISSES_TO_PAUSE < asked < 20
        book.answered("d")
        assert book.asks([seq], ["d"])

    def test_ended_sessions_are_told_once(self) -> None:
        book = DraftBook(4, 1000)
        book.asks([sequence([1])], ["d"])
        book.end("s")
        assert book.take_ended("d") == ["s"]
        assert book.take_ended("d") == []
