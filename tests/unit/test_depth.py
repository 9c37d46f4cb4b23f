"""Depths: the best choice for what is known, and learning it, in simulated worlds against the best fixed depth."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decode.costs import STEP, TRIP, Line, StepCosts
from services.decode.depth import Acceptance, Prospect, allot
from tests.draft_world import MS, Trip, World, batch, cpu, decoding, fixed, gpu, lookup, small_model, steep

chances = st.lists(st.floats(0.02, 0.99), max_size=3).map(lambda c: sorted(c, reverse=True))


def line(level: float, slope: float) -> Line:
    """That is certain."""
    made = Line(STEP)
    made.seen, made.level, made.slope = 1, level, slope
    return made


class TestAllot:
    @settings(deadline=None)
    @given(
        st.lists(st.tuples(chances, chances, st.floats(0.001, 0.02)), min_size=1, max_size=3),
        st.floats(0.001, 0.1),
        st.floats(0.0, 0.03),
        st.integers(0, 7),
    )
    def test_no_other_choice_brings_more_tokens_per_second(
        self, kinds: list[tuple[list[float], list[float], float]], level: float, slope: float, room: int
    ) -> None:
        prospects = [
            Prospect(held, asked, [trip * (1 + j / 2) for j in range(len(asked))]) for held, asked, trip in kinds
        ]
        cost = line(level, slope)
        chosen = allot(prospects, cost, room, 1.0)
        assert sum(chosen.depths) <= room
        best = max(
            rate(prospects, cost, depths, wait)
            for wait in (0.0, *(a for p in prospects for a in p.arrival))
            for depths in itertools.product(*(range(max(len(p.held), len(p.asked)) + 1) for p in prospects))
            if sum(depths) <= room
        )
        waits = (0.0, *(a for p in prospects for a in p.arrival if a <= chosen.wait + 1e-9))
        mine = max(rate(prospects, cost, tuple(chosen.depths), w) for w in waits)
        assert mine >= best * 0.985  # waits that are nearly the same are not told apart

    def test_the_wait_is_what_makes_drafts_pay_just_so(self) -> None:
        cost = line(40 * MS, 3 * MS)
        chosen = allot([Prospect((), (0.5,), (5 * MS,))], cost, 8, 1.0)
        assert chosen.depths == [1]
        assert 1.5 / (46 * MS + chosen.wait) == pytest.approx(1 / (43 * MS))
        assert allot([Prospect((), (0.5,), (5 * MS,))], cost, 8, 0.01).wait == 0.01
        assert allot([Prospect((), (0.5,), (30 * MS,))], cost, 8, 1.0).depths == [0]

    def test_who_has_better_prospects_gets_more(self) -> None:
        chosen = allot([Prospect((0.9, 0.8, 0.7)), Prospect((0.3, 0.1)), Prospect()], line(40 * MS, 3 * MS), 3, 0.0)
        assert chosen.depths == [3, 0, 0]


def rate(prospects: list[Prospect], cost: Line, depths: tuple[int, ...], wait: float) -> float:
    tokens = float(len(prospects))
    for prospect, depth in zip(prospects, depths, strict=True):
        for place in range(depth):
            held = prospect.held[place] if place < len(prospect.held) else 0.0
            there = place < len(prospect.asked) and prospect.arrival[place] <= wait
            tokens += max(held, prospect.asked[place] if there else 0.0)
    return tokens / (cost.at(len(prospects) + sum(depths)) + wait)


class TestLine:
    def test_finds_level_and_slope_and_follows_the_pace_of_the_machine(self) -> None:
        rng, fit = random.Random(1), Line(STEP)
        for pace in (1.0, 1.8, 0.7):
            for _ in range(60):
                x = rng.choice([1, 3, 5, 9])
                fit.see(x, pace * (40 + 6 * x) * MS * rng.gauss(1, 0.08))
            assert fit.at(1) == pytest.approx(pace * 46 * MS, rel=0.12)
            assert fit.at(9) == pytest.approx(pace * 94 * MS, rel=0.12)

    def test_is_unsure_of_what_it_has_not_seen_and_learns_it_at_once(self) -> None:
        costs = StepCosts()
        for _ in range(100):
            costs.see(1, 9, 90 * MS)
        assert not costs.sure(1)
        costs.see(1, 1, 15 * MS)
        costs.see(1, 1, 15 * MS)
        assert costs.sure(1)
        known = costs.line(1)
        assert known is not None
        assert known.at(1) == pytest.approx(15 * MS, rel=0.3)

    def test_one_pause_of_the_machine_is_not_what_a_step_costs(self) -> None:
        fit = Line(STEP)
        for _ in range(50):
            fit.see(1, 40 * MS)
        fit.see(1, 5.0)
        assert fit.at(1) < 55 * MS

    def test_a_drafter_that_becomes_slow_is_known_to_be_so_after_a_few_answers(self) -> None:
        fit = Line(TRIP)
        for _ in range(50):
            fit.see(4, 1 * MS)
        for _ in range(6):
            fit.see(4, 60 * MS)
        assert fit.at(4) > 30 * MS

    @given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 10)), min_size=1, max_size=60))
    def test_never_expects_less_than_nothing(self, seen: list[tuple[int, float]]) -> None:
        fit = Line(STEP)
        for x, y in seen:
            fit.see(x, y)
            assert fit.slope >= 0
            assert fit.at(1) > 0
            assert fit.spread(1) >= 0


class TestBend:
    def test_the_first_draft_costs_more_than_the_next(self) -> None:
        """At 52, 64, 69, 74 ms for 1 to 4 positions a first draft that is right in one of six cases does not pay."""
        costs, rng = StepCosts(), random.Random(3)
        for turn in range(300):
            positions = 1 if turn % 5 == 0 else rng.choice((2, 2, 3, 4))
            costs.see(1, positions, (52 if positions == 1 else 54 + 5 * positions) * MS * rng.gauss(1.0, 0.02))
        cost = costs.line(1)
        assert cost is not None
        assert costs.bend(1) < 0.96
        for chance, depth in ((0.16, 0), (0.5, 1)):
            assert allot([Prospect((chance,))], cost, 8, 0.0, costs.bend(1)).depths == [depth]

    def test_nothing_is_made_of_noise(self) -> None:
        costs, rng = StepCosts(), random.Random(4)
        for _ in range(300):
            positions = rng.choice((1, 2, 3, 4))
            costs.see(1, positions, (50 + 4 * positions) * MS * rng.gauss(1.0, 0.05))
        assert costs.bend(1) > 0.97


class TestAcceptance:
    def test_a_new_sequence_is_expected_to_be_as_others_until_it_shows_otherwise(self) -> None:
        common = Acceptance(64)
        for _ in range(50):
            other = common.child(10)
            other.answered("x")
            other.see("x", 0, True)
            other.see("x", 1, True)
        assert common.child(10).asked(2)[0][1] > 0.9
        odd = common.child(10)
        for _ in range(6):
            odd.answered("x")
            odd.see("x", 0, False)
        assert odd.asked(1)[0][0] < 0.3

    def test_answers_without_drafts_count(self) -> None:
        seen = Acceptance(64).child(10)
        for turn in range(40):
            seen.answered("x" if turn % 4 == 0 else "")
            if turn % 4 == 0:
                seen.see("x", 0, True)
        assert 0.1 < seen.asked(1)[0][0] < 0.5
        assert seen.held("x", 0, 1)[0] > 0.8

    def test_what_the_drafter_says_of_its_drafts_is_believed_as_far_as_it_came_true(self) -> None:
        common = Acceptance(64)
        honest, liar = (0.2, 0.9, 0.5), (0.95, 0.95, 0.95)
        assert common.held("honest", 0, 3, honest) == pytest.approx([0.2, 0.18, 0.09])
        rng = random.Random(1)
        for _ in range(200):
            one = common.child(10)
            said = rng.choice((0.1, 0.5, 0.9))
            one.see("honest", 0, rng.random() < said, said)
            one.see("liar", 0, rng.random() < 0.1, 0.95)
        assert common.child(10).held("honest", 0, 1, (0.5,))[0] == pytest.approx(0.5, abs=0.12)
        assert common.child(10).held("liar", 0, 3, liar)[0] < 0.25
        assert common.child(10).held("honest", 1, 2, honest[1:]) != common.child(10).held("honest", 1, 2)

    def test_drafts_that_do_not_come_are_not_checked(self) -> None:
        """An answer with drafts is seldom, but right: few tokens come of asking, and little is checked in vain."""
        seen = Acceptance(64)
        for turn in range(120):
            seen.answered("x" if turn % 4 == 0 else "")
            if turn % 4 == 0:
                for index in range(3):
                    seen.see("x", index, True)
                seen.ended("x")
        right, coming = seen.asked(4)
        assert right[0] == pytest.approx(coming[0], rel=0.1)
        assert coming[0] == pytest.approx(0.25, abs=0.1)
        assert coming[3] < 0.7 * coming[0]
        dear = line(10 * MS, 30 * MS)  # a position costs nearly as much as a step
        arrival = [0.1 * MS] * 4
        assert allot([Prospect((), right, arrival, coming)], dear, 8, 1.0).depths[0] > 0
        assert allot([Prospect((), right, arrival)], dear, 8, 1.0).depths == [0]

    def test_the_first_draft_and_later_ones_are_told_apart(self) -> None:
        seen = Acceptance(64).child(10)
        for turn in range(40):
            seen.answered("x")
            seen.see("x", 0, turn % 2 == 0)
            if turn % 2 == 0:
                for index in range(1, 5):
                    seen.see("x", index, True)
        first, *_, last = seen.held("x", 0, 5)
        assert first == pytest.approx(0.5, abs=0.15)
        assert last > 0.8 * first
        assert seen.held("x", 2, 1)[0] > 0.9


WORLDS = list(itertools.product((cpu, gpu, steep), (lookup, small_model), (1, 4)))
GRADES = ((0.0, 0.0), (0.2, 0.2), (0.5, 0.5), (0.7, 0.8), (0.9, 0.9), (0.3, 0.95), (0.95, 0.98))


class TestWorlds:
    """Drafters share the machine here: while one works beside a step, the step does not get on."""

    @pytest.mark.slow
    def test_as_good_as_the_best_fixed_depth_and_never_worse_than_none(self) -> None:
        """The fixed depth is chosen with hindsight, at exact costs."""
        ratios = []
        for number, ((step, trip, count), (first, later)) in enumerate(itertools.product(WORLDS, GRADES)):
            world = World(step, trip, stolen=1.0, seed=number)
            book = world.book()
            sequences = batch(count, lambda _, f=first, la=later: (f, la))  # type: ignore[misc]
            world.run(book, sequences, 100 * step(count, count))
            rate = world.run(book, sequences, 150 * step(count, count))
            rates = [fixed(world, k, count, first, later) for k in range(9)]
            name = (step.__name__, trip.__name__, count, first, later)
            assert rate > 0.93 * rates[0], name
            assert rate > 0.97 * rates[0] or first > 0.0, name
            assert rate > 0.7 * max(rates), name
            ratios.append(rate / max(rates))
        assert sum(ratios) / len(ratios) > 0.95

    @pytest.mark.parametrize("trip", [lookup, small_model])
    @pytest.mark.parametrize("count", [1, 8])
    def test_a_useless_drafter_costs_short_requests_next_to_nothing(self, trip: Trip, count: int) -> None:
        plain = World(cpu, trip, drafters=[])
        assert short_requests(World(cpu, trip, stolen=1.0), count) > 0.97 * short_requests(plain, count)

    @pytest.mark.parametrize("count", [1, 8])
    def test_text_that_turns_from_prose_to_quotation_and_back(self, count: int) -> None:
        def mixed(position: int) -> tuple[float, float]:
            return (0.95, 0.98) if position % 180 < 60 else (0.02, 0.3)

        world = World(cpu, lookup, stolen=1.0)
        rate = world.run(world.book(), batch(count, mixed), 900 * cpu(count, count))
        quoting = max(fixed(world, k, count, 0.95, 0.98) for k in range(9))
        prose = max(fixed(world, k, count, 0.02, 0.3) for k in range(9))
        assert rate > 0.84 * 180 / (60 / quoting + 120 / prose)
        assert rate > 1.05 * fixed(world, 0, count, 0, 0)

    def test_reacts_within_a_few_steps(self) -> None:
        world = World(cpu, lookup, noise=0.0)
        book = world.book()
        live = batch(1, lambda position: (1.0, 1.0) if position < 300 else (0.0, 0.0))
        while live["s0"][0].generated < 300:
            world.once(book, live)
        before = world.drafted
        assert before > 200
        for _ in range(40):
            world.once(book, live)
        assert world.drafted - before < 70, "it went on verifying what is always wrong"
        asked = world.asked
        for _ in range(200):
            world.once(book, live)
        assert world.asked - asked <= 3
        live["s0"] = (live["s0"][0], lambda _: (1.0, 1.0))
        made = sum(world.once(book, live) for _ in range(40))
        assert made > 150, "it did not see that drafts are right again"

    def test_no_sequence_is_forgotten(self) -> None:
        """In a batch where nothing pays, each is tried again and again."""
        world = World(cpu, lookup, stolen=1.0)
        book = world.book()
        live = batch(8, never)
        live["odd"] = (decoding([1, 2, 3], 10**6, "odd"), never)
        world.run(book, live, 30.0)
        live["odd"] = (live["odd"][0], lambda _: (0.95, 0.97))
        began, had = world.now, live["odd"][0].generated
        while live["odd"][0].generated - had < 2 * (live["s0"][0].generated - had) or live["odd"][0].generated == had:
            world.once(book, live)
            assert world.now - began < 40.0

    @pytest.mark.parametrize("trip", [lookup, small_model])
    def test_a_drafter_frozen_for_five_seconds_costs_one_wait(self, trip: Trip) -> None:
        """And it is asked again as soon as it wakes up."""
        world = World(cpu, trip, frozen=lambda now: max(15.0 - now, 0.0) if now > 10.0 else 0.0)
        book, live = world.book(), batch(1, lambda _: (0.8, 0.9))
        world.run(book, live, 10.0)
        waited = world.waited
        rate = world.run(book, live, 15.0 - world.now)
        assert world.waited - waited < 0.1
        assert rate > 0.95 * fixed(world, 0, 1, 0, 0)
        rate = world.run(book, live, 5.0)
        assert rate > 0.9 * max(fixed(world, k, 1, 0.8, 0.9) for k in range(9))

    def test_the_same_history_gives_the_same_choices(self) -> None:
        def once() -> tuple[int, int, int, float]:
            world = World(cpu, lookup, seed=5)
            world.run(world.book(), batch(3, lambda p: (0.6, 0.8) if p % 50 < 25 else (0.1, 0.1)), 8.0)
            return world.asked, world.probes, world.drafted, world.now

        assert once() == once()


def never(position: int) -> tuple[float, float]:
    return 0.0, 0.0


def short_requests(world: World, count: int) -> float:
    """Tokens per second of a hundred requests of 20 to 60 tokens, `count` at a time, whose drafts are all wrong."""
    rng, tokens, book = random.Random(3), 0, world.book()
    for turn in range(100 // count):
        live = batch(count, never)
        for name in list(live):
            live[f"{turn}-{name}"] = (decoding([1, 2, 3], rng.randint(20, 60), f"{turn}-{name}"), live.pop(name)[1])
        while live:
            tokens += world.once(book, live)
            for name in [n for n, (s, _) in live.items() if s.generated >= s.max_tokens]:
                book.end(name)
                del live[name]
    return tokens / world.now
