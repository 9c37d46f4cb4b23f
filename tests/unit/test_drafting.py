"""The decode worker's side of drafting: whom it asks, what it tells them, which answers it believes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.decode.drafters import MAX_PAUSE, UNREAD, Ask, DrafterState, readers
from services.decode.sequence import Sequence
from services.decode.speculation import DraftBook
from services.decode.telling import MAX_STATES, MAX_TOLD
from shared.codec import encode
from shared.messages import MAX_BATCH, MAX_HIDDEN, MAX_SESSION_TOKENS, Beat, Draft, DraftAsk, DraftItem, Sampling
from tests.draft_world import MS, decoding

LONG = list(range(UNREAD + 50))


def fixed(depth: int = 4) -> DraftBook:
    return DraftBook(depth, 1000, longest_wait=0.05, step_tokens=256, adaptive=False)


def adaptive(depth: int = 4, *, step: float = 40 * MS) -> DraftBook:
    """That has seen steps, and knows from a first answer that its drafter is quick."""
    book = DraftBook(depth, 1000, longest_wait=0.05, step_tokens=256)
    for _ in range(10):
        book.stepped(1, 1, step)
    other = decoding([1, 2, 3], name="first")
    asks, _ = book.plan([other], ["d"])
    assert asks == [], "an unknown drafter was waited for"
    (probe,) = book.probes([other])
    answer(book, probe, [9])
    book.settle([other])
    book.end("first")
    return book


def ask(book: DraftBook, *sequences: Sequence, drafters: tuple[str, ...] = ("d",)) -> list[Ask]:
    return book.plan(sequences, list(drafters))[0]


def answer(book: DraftBook, asked: Ask, tokens: list[int], seconds: float = MS, source: str = "x") -> int:
    """The same drafts for each sequence."""
    drafts = [
        Draft(session=i.session, position=i.base + len(i.token_ids), token_ids=tokens, source=source)
        for i in asked.items
    ]
    return book.answered(asked, drafts, [], seconds)


class TestWhatIsTold:
    def test_each_token_once(self) -> None:
        book, seq = fixed(), decoding([1, 2, 3])
        (first,) = ask(book, seq)
        assert first.items[0].token_ids == [1, 2, 3]
        answer(book, first, [7])
        seq.tokens.append(4)
        (second,) = ask(book, seq)
        assert (second.items[0].base, second.items[0].token_ids) == (3, [4])

    def test_everything_again_to_another_drafter_or_when_asked_to(self) -> None:
        book, seq = fixed(), decoding([1, 2, 3])
        ask(book, seq)
        (other,) = ask(book, seq, drafters=("e",))
        assert (other.drafter, other.items[0].base) == ("e", 0)
        book.answered(other, [], [], MS)
        (forgotten,) = ask(book, seq, drafters=("e",))
        assert forgotten.items[0].base == 3
        book.answered(forgotten, [], ["s"], MS)
        (again,) = ask(book, seq, drafters=("e",))
        assert again.items[0].base == 0

    def test_never_more_than_may_be_generated(self) -> None:
        book = fixed()
        assert ask(book, decoding([1], max_tokens=3))[0].items[0].k == 2
        assert ask(book, decoding([1], max_tokens=1, name="t")) == []

    def test_the_end_of_a_session_once_and_only_to_who_knows_it(self) -> None:
        book, seq = fixed(), decoding([1])
        ask(book, seq)
        book.end("s")
        book.end("s")
        assert book.take_ended("d") == ["s"]
        assert book.take_ended("d") == []
        fresh = DraftBook(4, 1000, longest_wait=0.05, step_tokens=256)
        ask(fresh, decoding([1]))  # nothing is known yet, so nothing was asked
        fresh.end("s")
        assert fresh.take_ended("d") == []

    def test_all_of_it_after_an_answer_that_never_came(self) -> None:
        book, seq = fixed(), decoding([1, 2, 3])
        (lost,) = ask(book, seq)
        book.missed(lost)
        book.lost(lost)
        for _ in range(20):
            assert ask(book, seq) == [], "waited for a drafter in doubt"
            if probes := book.probes([seq]):
                break
        assert probes[0].items[0].token_ids == [1, 2, 3]


class TestWhatIsBelieved:
    def test_stale_forged_and_oversized_answers(self) -> None:
        book, seq = fixed(), decoding([1, 2, 3])
        forged = [
            Draft(session="s", position=2, token_ids=[1], source="x"),
            Draft(session="s", position=3, token_ids=[1000], source="x"),
            Draft(session="other", position=3, token_ids=[1], source="x"),
        ]
        (asked,) = ask(book, seq)
        assert book.answered(asked, forged, ["nobody"], MS) == 3
        assert book.settle([seq]) == []
        assert not seq.drafts
        (asked,) = ask(book, seq)
        twice = [Draft(session="s", position=3, token_ids=list(range(n, n + 30)), source="x") for n in (0, 100)]
        assert book.answered(asked, twice, [], MS) == 1
        assert book.settle([seq]) == [(seq, "d:x")]
        assert seq.drafts == (0, 1, 2, 3)

    def test_what_is_left_of_a_late_answer_is_verified_if_its_beginning_came_true(self) -> None:
        book, seq = fixed(), decoding([1, 2, 3])
        (asked,) = ask(book, seq)
        book.missed(asked)
        book.settle([seq])
        seq.tokens += [10, 11]
        answer(book, asked, [10, 11, 12, 13])
        book.settle([seq])
        assert seq.drafts == (12, 13)

    def test_nothing_of_a_late_answer_that_was_wrong(self) -> None:
        book, seq = fixed(), decoding([1, 2, 3])
        (asked,) = ask(book, seq)
        book.missed(asked)
        seq.tokens += [10]
        answer(book, asked, [77, 11, 12])
        assert book.settle([seq]) == []
        assert not seq.drafts

    @pytest.mark.parametrize("bad", ["unknown", "forged"])
    def test_a_drafter_that_says_nothing_useful_is_soon_not_waited_for(self, bad: str) -> None:
        book, seq = adaptive(), decoding([1, 2, 3], 10_000)
        waited = 0
        for _ in range(300):
            for asked in ask(book, seq):
                waited += 1
                forged = [Draft(session="s", position=1, token_ids=[1], source="x")] if bad == "forged" else []
                book.answered(asked, forged, ["s"] if bad == "unknown" else [], MS)
            for probe in book.probes([seq]):
                book.answered(probe, [], [], MS)
            book.settle([seq])
            seq.tokens.append(5)
            book.stepped(1, 1, 40 * MS)
        assert 0 < waited < 30

    def test_names_of_sources_without_end_are_not_kept(self) -> None:
        book, seq = fixed(), decoding([1, 2, 3], 10_000)
        for number in range(200):
            (asked,) = ask(book, seq)
            answer(book, asked, [5], source=f"x{number}")
            book.settle([seq])
            seq.tokens.append(6)
        session = book._sessions["s"]
        assert session.acceptance.common is not None
        assert max(len(session.acceptance.rates), len(session.acceptance.common.rates)) < 12


class TestWhoIsWaitedFor:
    def test_a_drafter_that_missed_only_after_it_has_answered_again(self) -> None:
        book, seq = adaptive(), decoding([1, 2, 3], 1000)
        (asked,) = ask(book, seq)
        book.missed(asked)
        for _ in range(100):
            assert ask(book, seq) == []
            assert book.probes([seq]) == [], "buried in asks"
        answer(book, asked, [5])
        seq.tokens += [5]
        assert ask(book, seq)

    def test_asks_that_are_lost_are_repeated_ever_more_seldom(self) -> None:
        book, seq = adaptive(), decoding([1, 2, 3], 100_000)
        (asked,) = ask(book, seq)
        book.missed(asked)
        book.lost(asked)
        probes = 0
        for _ in range(2000):
            assert ask(book, seq) == []
            for probe in book.probes([seq]):
                probes += 1
                book.lost(probe)
            seq.tokens.append(3)
            book.stepped(1, 1, 40 * MS)
        assert 2000 / MAX_PAUSE < probes < 16

    def test_a_long_prompt_is_told_beside_a_step(self) -> None:
        book, seq = adaptive(), decoding(LONG, 1000)
        assert ask(book, seq) == []
        (probe,) = book.probes([seq])
        assert probe.items[0].token_ids == LONG
        assert ask(book, seq) == [], "it is still reading"
        answer(book, probe, [5], seconds=0.4)
        seq.tokens.append(5)
        assert ask(book, seq), "what reading takes is not what an answer takes"

    def test_not_one_that_takes_longer_than_its_drafts_save(self) -> None:
        book, seq = adaptive(step=10 * MS), decoding([1, 2, 3], 1000)
        for _ in range(12):
            for asked in (*ask(book, seq), *book.probes([seq])):
                answer(book, asked, [5, 6, 7, 8], seconds=49 * MS)
            book.settle([seq])
            seq.tokens += [5, 6, 7, 8]
        assert ask(book, seq) == []

    def test_a_wait_is_never_longer_than_what_is_saved(self) -> None:
        book, seq = adaptive(step=10 * MS), decoding([1, 2, 3], 1000)
        asks, wait = book.plan([seq], ["d"])
        assert asks
        k = asks[0].items[0].k
        assert 0 < wait <= 10 * MS * k, "k drafts save k steps at most"


class TestWhatADrafterCannotHold:
    """It is full, or the sequence is too long for it: then it is not told all of it over and over."""

    def generate(self, book: DraftBook, seq: Sequence, steps: int, known: Callable[[Ask], bool]) -> tuple[int, int]:
        """Asks and tokens told."""
        asks = told = 0
        for _ in range(steps):
            for asked in (*ask(book, seq), *book.probes([seq])):
                asks += 1
                told += asked.told
                if known(asked):
                    answer(book, asked, [5])
                else:
                    book.answered(asked, [], [seq.id], MS)
            book.settle([seq])
            seq.tokens.append(5)
            book.stepped(1, 1, 40 * MS)
        return asks, told

    @pytest.mark.parametrize("adapts", [True, False])
    @pytest.mark.parametrize("length", [100, 5000])
    def test_one_that_is_not_taken_on(self, adapts: bool, length: int) -> None:
        book = adaptive() if adapts else fixed()
        seq = decoding([1] * length, 100_000)
        asks, told = self.generate(book, seq, 1000, lambda _: False)
        assert 1 < asks <= 5, "not never again: there may be room by now"
        assert told < asks * (length + 1000)

    @pytest.mark.parametrize("adapts", [True, False])
    def test_one_that_is_forgotten_again_and_again(self, adapts: bool) -> None:
        """It is taken on each time, and never drafted for."""
        book = adaptive() if adapts else fixed()
        seq = decoding([1] * 100, 100_000)
        fresh = 0
        for _ in range(1000):
            for asked in (*ask(book, seq), *book.probes([seq])):
                fresh += asked.items[0].base == 0
                book.answered(asked, [], [] if asked.items[0].base == 0 else [seq.id], MS)
            book.settle([seq])
            seq.tokens.append(5)
            book.stepped(1, 1, 40 * MS)
        assert 2 <= fresh <= 7

    def test_is_told_all_again_at_once_if_it_was_forgotten_for_once(self) -> None:
        book, seq = adaptive(), decoding([1] * 100, 100_000)
        bases = []
        for turn in range(60):
            for asked in (*ask(book, seq), *book.probes([seq])):
                bases.append(asked.items[0].base)
                if turn in (20, 40):
                    book.answered(asked, [], [seq.id], MS)
                else:
                    answer(book, asked, [5])
            book.settle([seq])
            seq.tokens.append(5)
        assert bases.count(0) == 3
        assert len(bases) > 50

    def test_is_asked_for_by_another_drafter_at_once(self) -> None:
        book, seq = fixed(), decoding([1] * 100, 1000)
        self.generate(book, seq, 3, lambda _: False)
        assert ask(book, seq) == []
        assert ask(book, seq, drafters=("e",))

    @pytest.mark.parametrize("adapts", [True, False])
    def test_one_too_long_for_any_is_not_told_at_all(self, adapts: bool) -> None:
        book = adaptive() if adapts else fixed()
        long = decoding([1] * (MAX_SESSION_TOKENS - 1), 1000)
        asked = [*ask(book, long), *book.probes([long])]
        assert asked[0].told == MAX_SESSION_TOKENS - 1
        answer(book, asked[0], [5])
        long.tokens += [5, 5]
        assert [*ask(book, long), *book.probes([long])] == []
        assert book.settle([long]) == []

    def test_what_the_bus_does_not_take_is_the_largest_ones_fault_and_no_doubt_of_the_drafter(self) -> None:
        book = fixed()
        small, large = decoding([1] * 10, 1000, "small"), decoding([1] * 5000, 1000, "large")
        (first,) = ask(book, small)
        answer(book, first, [9])
        small.tokens += [9, 1]
        (asked,) = ask(book, small, large)
        assert len(asked.items) == 2
        book.unsent(asked)
        (again,) = ask(book, small, large)
        assert [(i.session, i.base) for i in again.items] == [("small", 10)]
        assert not book._drafters["d"].doubted
        answer(book, again, [7])
        assert book.settle([small, large]) == [(small, "d:x")]


class TestWhatTheDrafterSays:
    def test_only_likely_drafts_are_checked(self) -> None:
        """Where a position costs a third of a step, one that comes true half the time pays, one in ten does not."""
        for chances, checked in (([0.9, 0.9, 0.1, 0.9], 2), ([0.05, 0.9, 0.9, 0.9], 0), ([0.9] * 4, 4)):
            book, seq = adaptive(), decoding([1, 2, 3], 1000)
            book.probes([])
            for positions in (1, 2, 4, 1, 2, 4, 1):
                book.stepped(1, positions, (30 + 10 * positions) * MS)
            (asked,) = ask(book, seq)
            draft = Draft(session="s", position=3, token_ids=[5, 6, 7, 8], source="x", chances=chances)
            assert book.answered(asked, [draft], [], MS) == 0
            book.settle([seq])
            assert len(seq.drafts) == checked

    def test_the_drafter_is_told_what_is_worth_checking(self) -> None:
        book, seq = adaptive(), decoding([1, 2, 3], 1000)
        book.probes([])
        for positions in (1, 2, 4, 1, 2, 4, 1):
            book.stepped(1, positions, (30 + 10 * positions) * MS)
        (asked,) = ask(book, seq)
        assert asked.least == pytest.approx(0.25, abs=0.05)
        (item,) = asked.items
        assert item.k + item.more == 4


class TestHowLongAnAnswerTakes:
    def test_it_is_known_by_how_many_sequences_are_asked_about(self) -> None:
        """Half a step for eight sequences is too long, for one a tenth is not."""
        drafter = DrafterState()
        for _ in range(20):
            for count, seconds in ((1, 5 * MS), (8, 25 * MS)):
                asked = Ask(
                    "d",
                    [DraftItem(session=f"s{n}", base=0, token_ids=[1], k=4, sampling=Sampling()) for n in range(count)],
                    True,
                )
                drafter.answered(asked, 1, seconds, True)
        assert drafter.arrivals(1, 4, 1.0)[0] == pytest.approx(5 * MS, rel=0.1)
        assert drafter.arrivals(8, 4, 1.0)[0] == pytest.approx(25 * MS, rel=0.1)
        assert drafter.arrivals(60, 4, 1.0)[0] == pytest.approx(25 * MS, rel=0.1)
        assert DrafterState().arrivals(1, 4, 1.0) == [0.0] * 4


class TestDisturbedSteps:
    """Steps beside which a drafter computes tell nothing of what a step costs."""

    def seen(self, book: DraftBook) -> int:
        line = book._costs.line(1)
        return line.seen if line else 0

    def test_nothing_is_learned_while_a_missed_answer_is_being_made(self) -> None:
        book, seq = adaptive(), decoding([1, 2, 3], 1000)
        (asked,) = ask(book, seq)
        book.missed(asked)
        before = self.seen(book)
        for _ in range(5):
            assert book.probes([seq]) == []
            book.settle([seq])
            book.stepped(1, 1, 400 * MS)
            assert ask(book, seq) == []
        assert self.seen(book) == before
        answer(book, asked, [5])
        book.probes([])
        book.stepped(1, 1, 40 * MS)
        assert self.seen(book) == before + 1

    def test_nor_while_one_to_a_probe_is(self) -> None:
        book, seq = adaptive(), decoding(LONG, 1000)
        ask(book, seq)
        (probe,) = book.probes([seq])
        before = self.seen(book)
        for _ in range(5):
            book.stepped(1, 1, 400 * MS)
            ask(book, seq)
            book.probes([seq])
        assert self.seen(book) == before
        book.lost(probe)
        ask(book, seq)
        book.probes([])
        book.stepped(1, 1, 40 * MS)
        assert self.seen(book) == before + 1


class TestHiddenStates:
    def told(self, book: DraftBook, sequence: Sequence, *readers: str) -> bytes:
        ((asked,), _) = book.plan([sequence], ["d"], readers)
        answer(book, asked, [7])
        return asked.items[0].hidden

    def test_to_who_reads_them_as_long_as_they_are_the_last_tokens(self) -> None:
        book, seq = fixed(), decoding([1, 2, 3])
        assert self.told(book, seq, "d") == b"", "there is none of a prompt"
        seq.extend((4, 5), b"five")
        assert self.told(book, seq) == b""
        assert self.told(book, seq, "e") == b""
        assert self.told(book, seq, "d") == b"five"
        seq.tokens.append(6)
        assert self.told(book, seq, "d") == b""

    def test_also_beside_a_step(self) -> None:
        book, seq = adaptive(), decoding(LONG, 1000)
        seq.extend((4,), b"four")
        assert book.plan([seq], ["d"], ["d"])[0] == []
        assert book.probes([seq])[0].items[0].hidden == b"four"

    def test_no_more_than_a_message_holds(self) -> None:
        many = [decoding([1], name=f"s{n}") for n in range(MAX_BATCH)]
        for seq in many:
            seq.extend((4,), bytes(2 * MAX_HIDDEN))
        (asked,), _ = fixed().plan(many, ["d"], ["d"])
        assert sum(bool(i.hidden) for i in asked.items) == MAX_STATES // (2 * MAX_HIDDEN)
        assert len(asked.items) == MAX_BATCH
        message = DraftAsk(worker="w", wait_ms=1.0, items=asked.items)
        assert len(encode(message)) < 1 << 20 < DraftAsk.max_bytes

    def test_drafters_read_those_of_one_size(self) -> None:
        beats = [Beat(role="drafter", worker=f"d{size}", hidden_size=size) for size in (0, 4, 8)]
        assert readers(beats, 4) == {"d4"}
        assert readers(beats, 0) == set(), "the engine reports none"

    def test_where_the_bus_takes_no_large_message_there_are_fewer_of_them(self) -> None:
        book = fixed()
        sequences = [decoding([1, 2, 3], name=f"s{n}") for n in range(8)]
        for sequence in sequences:
            sequence.extend((5,), bytes(100))
        (asked,) = book.plan(sequences, ["d"], {"d"})[0]
        assert sum(len(item.hidden) for item in asked.items) == 800
        book.unsent(asked)
        (again,) = book.plan(sequences, ["d"], {"d"})[0]
        assert len(again.items) == 8
        assert sum(len(item.hidden) for item in again.items) == 400


class TestNamesAndLongPrompts:
    @pytest.mark.parametrize("adapts", [True, False])
    def test_a_late_answer_is_not_taken_for_another_sequence_of_that_name(self, adapts: bool) -> None:
        """A client may use an id again before the answer about the first one comes."""
        book = adaptive() if adapts else fixed()
        first = decoding([1] * 100)
        asked = [*ask(book, first), *book.probes([first])]
        book.end(first.id)
        second = decoding([1] * 20)
        ask(book, second)
        assert answer(book, asked[0], [7, 7], seconds=0.3) == 1
        for _ in range(5):
            book.settle([second])
            assert second.drafts == ()
            second.tokens.append(2)
            ask(book, second)

    def test_one_ask_is_no_longer_than_a_message_may_be(self) -> None:
        book = fixed()
        many = [decoding(list(range(MAX_TOLD // 3)), name=f"s{n}") for n in range(5)]
        (first,) = ask(book, *many)
        assert len(first.items) == 3
        (long,) = ask(fixed(), decoding(list(range(MAX_TOLD + 10))))
        assert len(long.items) == 1, "the first always fits"
