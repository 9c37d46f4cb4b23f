"""Single flight's rules: one owner of a block at a time, nobody waits in a circle, every takeover ends."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.flights import EXPIRE, EXPIRE_SETTLED, MAX_NAMES, Flights, short
from shared.messages import CLAIM_NAME, MAX_CLAIMED, Claim

KEEP_S, GRACE_S, SETTLE_S = 100.0, 2.0, 0.2


def name(path: str) -> bytes:
    """A block's name; `path` spells the whole chain, so a block belongs to one prefix only."""
    return path.encode().rjust(CLAIM_NAME, b".")[-CLAIM_NAME:]


def chain(path: str) -> list[bytes]:
    return [name(path[: i + 1]) for i in range(len(path))]


def view(worker: str = "me") -> Flights:
    return Flights(worker, keep_s=KEEP_S, grace_s=GRACE_S, settle_s=SETTLE_S)


def claim(worker: str, path: str, start: int = 0, ended: tuple[int, ...] = ()) -> Claim:
    return Claim(worker=worker, names=b"".join(chain(path)[start:]), ended=list(ended))


def seen(*entries: Claim | None, worker: str = "me", now: float = 0.0) -> Flights:
    flights = view(worker)
    for seq, entry in enumerate(entries, start=1):
        flights.observe(seq, entry, now)
    return flights


class TestTurn:
    def test_who_is_first_computes_all(self):
        flights = seen(claim("me", "abc"), claim("you", "abc"))
        assert flights.turn(1, chain("abc")).wait == 0

    def test_who_is_later_waits_for_what_is_common(self):
        turn = seen(claim("you", "abx"), claim("me", "abcd")).turn(2, chain("abcd"))
        assert (turn.wait, turn.leader) == (2, 1)

    def test_each_block_has_the_earliest_claim(self):
        flights = seen(claim("you", "abx"), claim("she", "abcy"), claim("me", "abcd"))
        assert (flights.turn(3, chain("abcd")).wait, flights.turn(3, chain("abcd")).leader) == (3, 1)
        assert (flights.turn(3, chain("abcd")[2:]).wait, flights.turn(3, chain("abcd")[2:]).leader) == (1, 2)
        assert flights.turn(3, chain("abcd")[3:]).wait == 0

    def test_what_others_compute_behind_a_gap_is_not_waited_for(self):
        """They have the blocks of the gap, and we do not: nobody computes those for us."""
        assert seen(claim("you", "abc", start=1), claim("me", "abc")).turn(2, chain("abc")).wait == 0

    def test_within_a_worker_nobody_waits(self):
        turn = seen(claim("me", "abx"), claim("me", "abc")).turn(2, chain("abc"))
        assert turn.wait == 0
        assert turn.rides == {1}

    def test_but_for_what_others_compute_behind_it(self):
        turn = seen(claim("me", "abx"), claim("you", "abcx"), claim("me", "abcd")).turn(3, chain("abcd"))
        assert (turn.wait, turn.leader, set(turn.rides)) == (3, 1, {1})

    def test_an_end_hands_on_to_the_next(self):
        flights = seen(claim("you", "abc"), claim("she", "abc"), claim("me", "abc"))
        flights.observe(4, Claim(worker="you", ended=[1]), 0.0)
        assert flights.turn(3, chain("abc")).leader == 2
        assert flights.turn(2, chain("abc")).wait == 0

    def test_a_claim_may_end_others_and_begin_at_once(self):
        flights = seen(claim("you", "abc"), claim("me", "abc", ended=(1,)))
        assert flights.turn(2, chain("abc")).wait == 0

    def test_garbage_repeats_and_unknown_ends_change_nothing(self):
        flights = seen(claim("you", "abc"), None, Claim(worker="x", ended=[1000, 3]), claim("me", "abc"))
        flights.observe(1, claim("x", "q"), 0.0)
        flights.observe(3, Claim(worker="x", ended=[1]), 0.0)
        assert flights.last == 4
        assert flights.turn(4, chain("abc")).leader == 1

    def test_a_claim_that_lists_a_block_twice(self):
        flights = seen(Claim(worker="you", names=name("a") * 3), claim("me", "a"))
        assert flights.turn(2, chain("a")).leader == 1
        flights.end(1, 0.0)
        assert flights.turn(2, chain("a")).wait == 0

    def test_names_are_cut_alike(self):
        assert short([b"x" * 32, b"y" * 32]) == (b"x" * CLAIM_NAME, b"y" * CLAIM_NAME)


class TestEnds:
    def test_a_worker_whose_beats_stop_is_dead(self):
        flights = seen(claim("you", "abc"))
        assert not flights.lost(1, lambda w: True, 50.0)
        assert flights.lost(1, lambda w: False, 50.1)

    def test_a_worker_never_heard_of_is_given_a_moment(self):
        flights = seen(claim("you", "abc"))
        assert not flights.lost(1, lambda w: False, GRACE_S)
        assert flights.lost(1, lambda w: False, GRACE_S + 0.1)

    def test_this_worker_lives(self):
        assert not seen(claim("me", "abc")).lost(1, lambda w: False, 90.0)

    def test_nothing_counts_for_ever(self):
        flights = seen(claim("you", "abc"), claim("me", "abc"))
        flights.observe(3, None, KEEP_S + 1)
        assert not flights.holds(1)
        assert not flights._claims_of

    def test_blocks_of_an_ended_claim_may_be_about_to_appear(self):
        flights = seen(claim("you", "abc"))
        assert not flights.settling(name("a"), 1.0)
        flights.end(1, 1.0)
        assert flights.settling(name("a"), 1.0 + SETTLE_S / 2)
        assert not flights.settling(name("x"), 1.0)
        assert not flights.settling(name("a"), 1.0 + 2 * SETTLE_S)

    def test_claims_of_a_former_life_are_found(self):
        flights = seen(claim("me", "abc"), claim("you", "abc"), claim("me", "abc"))
        assert flights.strays({3}) == [1]

    def test_which_claims_are_ones_own(self):
        flights = seen(claim("me", "abc"), claim("you", "abc"))
        assert flights.holds(1, chain("abc"))
        assert not flights.holds(1, chain("abx"))
        assert not flights.holds(2, chain("abc"))


def names_of(number: int, count: int) -> bytes:
    return b"".join((number * 100_000 + i).to_bytes(CLAIM_NAME, "big") for i in range(count))


def kept(flights: Flights) -> int:
    """Names that it holds, counted as often as it holds them; checks that its tables say the same."""
    held = {seq: held.names for seq, held in flights._held.items()}
    assert flights._names == sum(len(names) for names in held.values())
    lists = {(name, seq) for name, claims in flights._claims_of.items() for seq in claims}
    assert lists == {(name, seq) for seq, names in held.items() for name in names}
    assert all(claims and claims == sorted(claims) for claims in flights._claims_of.values())
    assert set(flights._mine) == {seq for seq, held in flights._held.items() if held.worker == "me"}
    return max(flights._names, len(flights._settling))


class TestBounds:
    """Whatever others write, and however much."""

    @pytest.mark.parametrize("worker", ["you", "me"])
    @pytest.mark.parametrize(("claims", "blocks"), [(12, 400), (2500, 1)])
    def test_the_newest_claims_count(
        self, worker: str, claims: int, blocks: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("shared.flights.MAX_NAMES", 2000)
        flights = view()
        for seq in range(1, claims + 1):
            flights.observe(seq, Claim(worker=worker, names=names_of(seq, blocks)), 0.0)
        assert kept(flights) == 2000
        oldest = claims - 2000 // blocks + 1
        assert [flights.holds(seq) for seq in (1, oldest - 1, oldest, claims)] == [False, False, True, True]

    def test_there_is_room_for_several_of_the_longest(self) -> None:
        assert MAX_NAMES >= 4 * MAX_CLAIMED

    def test_one_name_in_all_claims_and_all_of_one_claim(self) -> None:
        flights = view()
        for seq in range(1, 5001):
            flights.observe(seq, Claim(worker="you", names=names_of(0, 1) * (30 if seq % 2 else 1)), 0.0)
        assert kept(flights) <= MAX_NAMES
        for seq in [*range(2, 5001, 2), *range(1, 5001, 2)]:
            flights.end(seq, 0.0)
        assert not flights._claims_of
        assert kept(flights) == 1

    def test_claims_that_end_at_once(self) -> None:
        flights = view()
        for seq in range(1, 100, 2):
            flights.observe(seq, Claim(worker="you", names=names_of(seq, 4000)), 0.0)
            flights.observe(seq + 1, Claim(worker="you", ended=[seq]), 0.0)
        assert kept(flights) == MAX_NAMES
        for _ in range(MAX_NAMES // EXPIRE_SETTLED):
            flights.expire(2 * SETTLE_S)
        assert kept(flights) == 0

    def test_age_is_worked_off_in_small_parts(self) -> None:
        flights = seen(*(claim("you", "ab") for _ in range(3 * EXPIRE + 1)))
        flights.observe(flights.last + 1, claim("you", "x"), KEEP_S + 1)
        assert [flights.holds(seq) for seq in (EXPIRE, EXPIRE + 1)] == [False, True]
        assert [flights.expire(KEEP_S + 1) for _ in range(3)] == [True, True, False]
        assert kept(flights) == 2
        assert flights.turn(flights.last, chain("x")).wait == 0

    def test_a_long_log_is_read_in_time_that_grows_with_its_length_alone(self) -> None:
        flights, pairs = view(), 10_000
        shared = names_of(0, 16)
        entries = [Claim(worker="you", names=shared) for _ in range(pairs)]
        entries += [Claim(worker="you", ended=[seq]) for seq in range(1, pairs + 1)]
        began = time.process_time()
        for seq, entry in enumerate(entries, start=1):
            flights.observe(seq, entry, 0.0)
        assert time.process_time() - began < 2.0, "it takes a quarter of this; scanning what is held, ten times as much"
        assert not flights._held


@dataclass
class Work:
    """One claim's life. Once it may, it computes in order what the cache does not have, and does not ask again."""

    worker: str
    names: list[bytes]
    seq: int
    over: bool = False
    started: bool = False
    rides: frozenset[int] = frozenset()

    def missing(self, cache: set[bytes]) -> list[bytes]:
        return next((self.names[i:] for i, n in enumerate(self.names) if n not in cache), [])


@dataclass
class World:
    """A log, a cache, and workers that look at the log whenever they like, but always right after they append."""

    rng: random.Random
    log: list[Claim | None] = field(default_factory=list)
    cache: set[bytes] = field(default_factory=set)
    views: dict[str, Flights] = field(default_factory=lambda: {w: view(w) for w in "PQRS"})
    works: list[Work] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    computed: dict[bytes, int] = field(default_factory=dict)

    def read(self, worker: str, upto: int | None = None) -> None:
        flights = self.views[worker]
        for seq in range(flights.last + 1, (upto or len(self.log)) + 1):
            flights.observe(seq, self.log[seq - 1], 0.0)

    def look_a_little(self, worker: str) -> None:
        self.read(worker, self.rng.randint(self.views[worker].last, len(self.log)) or None)

    def living(self) -> list[Work]:
        return [w for w in self.works if not w.over and w.worker not in self.dead]

    def arrive(self, worker: str) -> None:
        path = "".join(self.rng.choice("ab") for _ in range(self.rng.randint(1, 6)))
        names = chain(path)
        work = Work(worker, names, 0)
        if missing := work.missing(self.cache):
            self.log.append(Claim(worker=worker, names=b"".join(missing)))
            work.seq = len(self.log)
            self.read(worker)
            self.works.append(work)

    def compute(self, work: Work) -> None:
        """One block, if it may. That another worker is about to compute the same one is a fault."""
        missing = work.missing(self.cache)
        if not work.started:
            turn = self.views[work.worker].turn(work.seq, missing)
            work.started = not turn.wait
            work.rides = turn.rides if work.started else frozenset()  # who waits must hold up nobody
        if not work.started:
            return
        for other in self.living():
            if other.worker != work.worker and other.started:
                assert other.missing(self.cache)[:1] != missing[:1], "two workers own one block"
        if self.rng.random() < 0.5:
            self.computed[missing[0]] = self.computed.get(missing[0], 0) + 1
            self.cache.add(missing[0])

    def finish(self, work: Work) -> None:
        """Done or given up: the others are told, unless other work of its worker counts on the claim."""
        work.over = True
        needed = {s for w in self.living() if w.worker == work.worker for s in (w.seq, *w.rides)}
        for seq in {work.seq, *work.rides} - needed:
            self.log.append(Claim(worker=work.worker, ended=[seq]))
            self.views[work.worker].end(seq, 0.0)

    def judge(self, work: Work) -> bool:
        """End the claim it waits for, if that one's worker is dead."""
        flights = self.views[work.worker]
        turn = flights.turn(work.seq, work.missing(self.cache))
        if turn.wait and turn.leader not in turn.rides and flights.lost(turn.leader, self._alive, 1e9):
            self.log.append(Claim(worker=work.worker, ended=[turn.leader]))
            flights.end(turn.leader, 0.0)
            return True
        return False

    def _alive(self, worker: str) -> bool:
        return worker not in self.dead

    def step(self, action: str, number: int) -> None:
        worker = "PQRS"[number % 4]
        works = self.living()
        work = works[number % len(works)] if works else None
        if action == "die":
            self.dead |= {worker} if len(self.dead) < 3 else set()
        elif action == "arrive" and worker not in self.dead:
            self.arrive(worker)
        elif action == "garbage":
            self.log.append(None if number % 2 else Claim(worker="evil", ended=[number + 1000]))
        elif work is not None and action == "look":
            self.look_a_little(work.worker)
        elif work is not None and action == "judge":
            self.judge(work)
        elif work is not None and action == "cancel":
            self.finish(work)
        elif work is not None and action == "compute":
            self.compute(work)
        for done in self.living():
            if not done.missing(self.cache):
                self.finish(done)

    def settle(self) -> None:
        """From here on nobody arrives or dies: everything ends, in a number of rounds that is known."""
        claims, blocks = len(self.works), sum(len(w.names) for w in self.works)
        self.rng = random.Random(1)
        for _ in range(claims + 20 * blocks + 1):
            for work in self.living():
                self.read(work.worker)
                while self.judge(work):
                    pass
                if work.missing(self.cache):
                    self.compute(work)
                if not work.missing(self.cache):
                    self.finish(work)
            if not self.living():
                return
        raise AssertionError("somebody waits for ever")


ACTIONS = st.sampled_from(["arrive", "compute", "compute", "compute", "look", "judge", "cancel", "die", "garbage"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 1000)), max_size=60), st.integers(0, 2**32))
def test_any_order_of_events(steps: list[tuple[str, int]], seed: int) -> None:
    world = World(random.Random(seed))
    for action, number in steps:
        world.step(action, number)
    world.settle()
    assert set(world.computed.values()) <= {1}, "a block was computed twice"
    for work in world.works:
        if not work.over and work.worker not in world.dead:
            assert not work.missing(world.cache)


def test_thousands_of_crowds() -> None:
    rng = random.Random(0)
    names = ["arrive"] * 3 + ["compute"] * 6 + ["look"] * 2 + ["judge", "cancel", "die", "garbage"]
    for _ in range(2000):
        world = World(rng)
        for _ in range(40):
            world.step(rng.choice(names), rng.randrange(1000))
        world.settle()
        assert set(world.computed.values()) <= {1}
