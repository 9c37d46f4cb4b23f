"""Which decode worker a request is offered to, and what a pool's summary tells."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import pytest

from services.decode.affinity import LOAD_TOKENS, MIN_GAIN, Affinity
from shared.cache.summary import Summary, summarise
from shared.codec import decode, encode
from shared.messages import MAX_HELD, Beat, HeldBlocks, Load

SIZE = 16


def chain(count: int, seed: int = 0) -> list[bytes]:
    return [hashlib.sha256(f"{seed}.{index}".encode()).digest() for index in range(count)]


NAMES = chain(64)


@dataclass(frozen=True)
class Seen:
    """What is heard of a worker."""

    beat: Beat
    held: HeldBlocks


def heard(worker: str, held: int = 0, running: int = 0, waiting: int = 0, names: list[bytes] = NAMES) -> Seen:
    load = Load(running=running, waiting=waiting)
    return Seen(Beat(role="decode", worker=worker, load=load), summarise(worker, names[:held]))


def choose(affinity: Affinity, names: list[bytes], mine: int, running: int, seen: list[Seen]) -> str | None:
    for one in seen:
        affinity.observe(one.held)
    return affinity.choose(names, mine, running, [one.beat for one in seen])


class TestSummary:
    @pytest.mark.parametrize("held", [0, 1, 2, 63, 64])
    def test_of_a_small_pool_it_is_exact(self, held: int) -> None:
        summary = Summary(summarise("w", [*chain(200, 1), *NAMES[:held]]))
        assert summary.longest(NAMES) == held

    def test_a_hole_ends_it(self) -> None:
        assert Summary(summarise("w", [*NAMES[:5], *NAMES[6:]])).longest(NAMES) == 5
        assert Summary(summarise("w", NAMES[1:])).longest(NAMES) == 0

    def test_of_a_large_pool_it_is_small_and_never_tells_too_much(self) -> None:
        rng = random.Random(5)
        pool = set(chain(50_000, 1))
        held = summarise("w", pool)
        assert len(held.names) <= 8 * MAX_HELD
        told = 0
        for seed in range(40):
            names, count = chain(400, 100 + seed), rng.randrange(400)
            longest = Summary(summarise("w", pool | set(names[:count]))).longest(names)
            assert longest <= count
            told += count - longest
        assert told / 40 < 80, "most of a long prefix is seen"

    def test_nothing_is_everything_of_nothing(self) -> None:
        assert Summary(summarise("w", [])).longest(NAMES) == 0

    def test_it_crosses_the_bus(self) -> None:
        sent = summarise("w", NAMES)
        assert decode(encode(sent), HeldBlocks) == sent


class TestChoice:
    def test_the_one_that_holds_most(self) -> None:
        beats = [heard("a", 10), heard("b", 40), heard("c", 39)]
        assert choose(Affinity(SIZE), NAMES, 0, 0, beats) == "b"

    @pytest.mark.parametrize(("mine", "theirs"), [(0, 0), (40, 40), (41, 40), (0, 3), (37, 40), (64, 64)])
    def test_kept_when_there_is_little_to_gain(self, mine: int, theirs: int) -> None:
        assert choose(Affinity(SIZE), NAMES, mine, 0, [heard("b", theirs)]) is None

    def test_the_least_gain(self) -> None:
        least = MIN_GAIN // SIZE
        assert choose(Affinity(SIZE), NAMES, 0, 0, [heard("b", least)]) == "b"
        assert choose(Affinity(SIZE), NAMES, 0, 0, [heard("b", least - 1)]) is None

    def test_load_outweighs_a_prefix(self) -> None:
        names = chain(400)
        worth = (400 * SIZE - MIN_GAIN) // LOAD_TOKENS
        assert worth == 6
        for mine in (0, 3):
            for more, chosen in ((worth, "b"), (worth + 1, None)):
                seen = heard("b", 400, running=mine + more, names=names)
                assert choose(Affinity(SIZE), names, 0, mine, [seen]) == chosen

    def test_a_worker_that_has_requests_waiting_is_left_alone(self) -> None:
        assert choose(Affinity(SIZE), NAMES, 0, 0, [heard("b", 64, waiting=1)]) is None

    def test_what_it_took_counts_until_its_next_beat(self) -> None:
        names = chain(400)
        affinity, seen, taken = Affinity(SIZE), heard("b", 400, names=names), 0
        while choose(affinity, names, 0, 0, [seen]) == "b":
            affinity.took("b")
            taken += 1
        assert taken == 7
        assert choose(affinity, names, 0, 0, [heard("b", 400, names=names)]) == "b"

    def test_who_refused_or_said_nothing_is_left_alone_until_its_next_beat(self) -> None:
        affinity, seen = Affinity(SIZE), heard("b", 64)
        assert choose(affinity, NAMES, 0, 0, [seen]) == "b"
        affinity.refused("b")
        assert choose(affinity, NAMES, 0, 0, [seen]) is None
        assert choose(affinity, NAMES, 0, 0, [seen, heard("c", 8)]) == "c"
        assert choose(affinity, NAMES, 0, 0, [heard("b", 64)]) == "b"

    def test_who_is_gone_is_not_asked(self) -> None:
        affinity, seen = Affinity(SIZE), heard("b", 64)
        assert choose(affinity, NAMES, 0, 0, [seen]) == "b"
        assert choose(affinity, NAMES, 0, 0, []) is None

    def test_who_has_not_said_what_it_holds_is_passed_over(self) -> None:
        assert Affinity(SIZE).choose(NAMES, 0, 0, [Beat(role="decode", worker="b")]) is None

    def test_what_comes_of_an_offer_to_one_that_has_gone_is_no_trouble(self) -> None:
        affinity = Affinity(SIZE)
        affinity.took("gone")
        affinity.refused("gone")
        assert choose(affinity, NAMES, 0, 0, [heard("gone", 64)]) == "gone"
