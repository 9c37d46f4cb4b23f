"""What a drafter holds of sequences: what it was told, within bounds, and no longer than anybody asks."""

from __future__ import annotations

import random

import pytest

from services.drafter.sessions import ADMITTED, BUSY_S, IDLE_S, OVERHEAD, Session, SessionTable
from shared.messages import DraftItem, Sampling


def item(session: str, base: int, tokens: list[int], salt: str = "", prompt_len: int = 0) -> DraftItem:
    return DraftItem(
        session=session, base=base, token_ids=tokens, k=4, sampling=Sampling(), prompt_len=prompt_len, salt=salt
    )


def tell(
    table: SessionTable, base: int, tokens: list[int], name: str = "s", worker: str = "d", now: float = 0.0
) -> Session:
    session = table.update(worker, item(name, base, tokens), now)
    assert session is not None
    return session


def room_for(sessions: int, tokens: int) -> SessionTable:
    return SessionTable(int(sessions * (OVERHEAD + tokens) / ADMITTED) + 1)


def names(sessions: list[Session]) -> list[str]:
    return [session.key[1] for session in sessions]


class TestWhatIsTold:
    def test_updates_extend_and_roll_back(self) -> None:
        table = room_for(4, 10)
        session = tell(table, 0, [1, 2, 3])
        tell(table, 3, [4, 5])
        assert session.tokens == [1, 2, 3, 4, 5]
        tell(table, 2, [9])
        assert session.tokens == [1, 2, 9]

    def test_a_list_handed_out_only_grows(self) -> None:
        table = room_for(4, 10)
        session = tell(table, 0, [1, 2, 3])
        first = session.tokens
        tell(table, 0, [1, 2, 3])  # told again, as after a lost answer
        tell(table, 1, [2, 3, 4])
        assert session.tokens is first == [1, 2, 3, 4]
        tell(table, 0, [1, 2])
        assert session.tokens == [1, 2]
        tell(table, 1, [9])
        assert session.tokens == [1, 9]
        assert first == [1, 2, 3, 4]

    def test_a_base_beyond_what_is_known_is_unknown(self) -> None:
        table = room_for(4, 10)
        assert table.update("d", item("s", 3, [4]), 0.0) is None
        tell(table, 0, [1])
        assert table.update("d", item("s", 2, [4]), 0.0) is None

    def test_workers_do_not_share_sessions(self) -> None:
        table = room_for(4, 10)
        tell(table, 0, [1, 2], worker="d1")
        assert table.update("d2", item("s", 2, [3]), 0.0) is None

    def test_the_scope_is_tenant_and_salt(self) -> None:
        assert Session(("w", "acme/r/1"), salt="x").scope == ("acme", "x")

    def test_the_prompt_is_what_is_told_first_unless_its_length_is(self) -> None:
        table = room_for(4, 10)
        assert tell(table, 0, [1, 2, 3]).prompt_len == 3
        told = table.update("d", item("t", 0, [1, 2, 3], prompt_len=2), 0.0)
        assert told is not None
        assert told.prompt_len == 2


class TestAnotherSequenceOfTheSameName:
    """Its request has ended, and the client has used the id again, before or without word of the end."""

    @pytest.mark.parametrize(("salt", "prompt_len"), [("y", 2), ("x", 1), ("", 2)])
    def test_takes_the_place_of_the_first(self, salt: str, prompt_len: int) -> None:
        table = room_for(4, 10)
        first = table.update("d", item("a/s", 0, [1, 2, 3], "x", prompt_len=2), 0.0)
        assert first is not None
        again = table.update("d", item("a/s", 0, [1, 2], salt, prompt_len), 0.0)
        assert again is not None
        assert again is not first
        assert (again.tokens, again.salt, again.prompt_len) == ([1, 2], salt, prompt_len)
        assert table.take_ended() == [first]
        assert first.tokens == [1, 2, 3]

    def test_must_be_told_from_its_beginning(self) -> None:
        """A session never changes its salt."""
        table = room_for(4, 10)
        assert table.update("d", item("a/s", 0, [1], salt="x"), 0.0) is not None
        assert table.update("d", item("a/s", 1, [2], salt="y"), 0.0) is None


class TestRoom:
    def test_the_one_that_was_not_asked_about_for_longest_goes_first(self) -> None:
        table = room_for(2, 1)
        for at, name in enumerate("aba"):
            tell(table, 0, [1], name, now=float(at))
        tell(table, 0, [1], "c", now=10.0)
        assert names(table.take_ended()) == ["b"]
        assert len(table) == 2

    def test_none_goes_that_was_asked_about_lately(self) -> None:
        table = room_for(2, 2)
        tell(table, 0, [1], "a", now=0.0)
        tell(table, 0, [1, 2], "b", now=1.0)
        assert table.update("d", item("c", 0, [1]), BUSY_S) is None
        tell(table, 1, [2], "a", now=BUSY_S)
        tell(table, 0, [1], "c", now=BUSY_S + 1.5)
        assert names(table.take_ended()) == ["b"]

    def test_nor_in_vain_for_one_that_has_no_room_anyhow(self) -> None:
        table = room_for(2, 1)
        tell(table, 0, [1], "a", now=0.0)
        tell(table, 0, [1], "b", now=100.0)
        assert table.update("d", item("c", 0, [1] * 100), 101.0) is None
        assert table.update("d", item("d", 0, [1] * 100_000), 1000.0) is None
        assert table.take_ended() == []

    def test_one_that_grows_into_others_room_goes_itself(self) -> None:
        table = SessionTable(1000)
        tell(table, 0, [1] * 300, "a")
        tell(table, 0, [1] * 300, "b")
        assert table.update("d", item("a", 300, [1] * 300), 1.0) is None
        assert names(table.take_ended()) == ["a"]
        assert table.size == OVERHEAD + 300
        tell(table, 300, [1] * 500, "b", now=1.0)

    @pytest.mark.parametrize("workers", [9, 20])
    def test_more_than_fit_do_not_drive_each_other_out(self, workers: int) -> None:
        """All askers ask in turns, of more than there is room for: those that are in stay in, and are told each token
        once. The others are refused."""
        table, told, resent = room_for(200, 200), dict[str, int](), 0
        for turn in range(30):
            for worker in range(workers):
                for number in range(32):
                    name = f"t/{worker}-{number}"
                    base = told.get(name, 0)
                    session = table.update(f"w{worker}", item(name, base, [1] * (200 + turn - base)), 0.05 * turn)
                    resent += base > 0 and session is None
                    told[name] = 200 + turn if session else 0
        assert resent == 0
        assert len(table) == 200

    def test_the_bound_holds_whatever_is_asked(self) -> None:
        rng, table, now = random.Random(1), SessionTable(3000), 0.0
        alive: dict[str, Session] = {}
        for _ in range(5000):
            now += rng.random()
            name = f"s{rng.randrange(40)}"
            known = len(alive[name].tokens) if name in alive else 0
            base = rng.choice([0, known, rng.randrange(known + 2)])
            tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 120))]
            session = table.update("d", item(name, base, tokens, rng.choice(["", "", "x"])), now)
            if rng.random() < 0.05:
                table.end(("d", f"s{rng.randrange(40)}"))
            for ended in table.take_ended():
                if alive.get(ended.key[1]) is ended:
                    del alive[ended.key[1]]
            if session is not None and ("d", name) in table._sessions:
                alive[name] = session
            assert table.size == sum(s.size for s in alive.values()) <= 3000
            assert len(table) == len(alive)


def test_a_session_that_nobody_asks_about_ends() -> None:
    table = room_for(4, 10)
    for name in "ab":
        tell(table, 0, [1], name, now=0.0)
    tell(table, 1, [2], "a", now=IDLE_S / 2)
    table.expire(IDLE_S)
    assert table.take_ended() == []
    table.expire(IDLE_S + 0.1)
    assert names(table.take_ended()) == ["b"]
    assert table.update("d", item("b", 1, [2]), IDLE_S + 1) is None, "its asker comes back and is told so"
    assert tell(table, 0, [1, 2], "b", now=IDLE_S + 2).tokens == [1, 2]
    table.expire(IDLE_S * 3)
    assert names(table.take_ended()) == ["a", "b"]
    assert table.size == len(table) == 0
