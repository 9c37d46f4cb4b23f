"""The draft model: exact after any rollback, ahead or not, whatever the pool; nobody waits longer than a step."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.drafter.sessions import Session
from services.drafter.sources.base import Wish
from services.drafter.sources.chain import common_prefix
from services.drafter.sources.model import READ_EVERY, SHORT, ModelSource, Plan
from shared.engine.base import BadSpans
from shared.engine.span import Span
from shared.messages import Sampling
from tests.fake_engine import FakeEngine, completion


def session(tokens: Sequence[int], name: str = "a/s", salt: str = "", prompt_len: int = 0) -> Session:
    return Session(("w", name), list(tokens), prompt_len=prompt_len or len(tokens), salt=salt)


def wish(of: Session, k: int = 4, sampling: Sampling | None = None) -> Wish:
    return Wish(of, of.tokens, len(of.tokens), k, sampling or Sampling())


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def step(source: ModelSource) -> Plan | None:
    plan = source.plan()
    if plan is not None:
        source.commit(plan, *source.run(plan))
        check(source)
    return plan


def check(source: ModelSource) -> None:
    """Blocks are counted as often as they are held, and nobody writes where others read."""
    source._allocator.check_integrity([c.table for c in source._chains.values()])
    for chain in source._chains.values():
        assert len(chain.names) * source._info.block_size <= chain.computed < chain.length + len(chain.guesses)
        assert len(chain.table) <= source._allocator.blocks_for(source._info.context_length)


def draft(source: ModelSource, *wishes: Wish) -> list[list[int]]:
    """Ask, wait, take."""
    for one in wishes:
        source.want(one, one.k)
    while any(source.waits(w) for w in wishes):
        if step(source) is None:
            break
    found = [source.ready(w) for w in wishes]
    for one in wishes:
        source.answered(one)
    return found


def certain(source: ModelSource) -> ModelSource:
    """It has always been right so far: it guesses ahead as far as it may."""
    source.record.rates = [0.98] * len(source.record.rates)
    return source


class Watcher(FakeEngine):
    """Sees that no step writes into a block that somebody else may read."""

    source: ModelSource | None = None
    positions: list[int]

    def step(self, spans: Sequence[Span]) -> list[list[int]]:
        self.positions = [len(s.token_ids) for s in spans]
        size = self.info.block_size
        for span in spans if self.source else ():
            assert self.source is not None
            for index in range(span.start // size, (span.start + len(span.token_ids) - 1) // size + 1):
                assert self.source._allocator.name_of(span.table[index]) is None
                assert self.source._allocator.references(span.table[index]) == 1
        return super().step(spans)


def watched(*, blocks: int = 64, block_size: int = 4, context: int = 512) -> tuple[ModelSource, Watcher]:
    engine = Watcher(blocks=blocks, block_size=block_size, context=context)
    source = certain(ModelSource(engine))
    engine.source = source
    return source, engine


class TestExact:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 2**32), st.integers(10, 60))
    def test_drafts_are_the_models_own_continuation_whatever_was_accepted(self, seed: int, blocks: int) -> None:
        """Sessions with common beginnings, random acceptance, random steps ahead, a pool of random size, sessions that
        end, that are told anew from an earlier point, and that change their seed.
        """
        rng = random.Random(seed)
        engine = Watcher(blocks=blocks, seeded=True, context=150)
        source = engine.source = certain(ModelSource(engine))
        sessions: list[Session] = []
        seeds: dict[Session, int] = {}
        for _ in range(25):
            if len(sessions) < 3 or rng.random() < 0.1:
                new = session(prompt(rng.randrange(1, 40), rng.randrange(2)), f"{rng.choice('ab')}/{rng.random()}")
                seeds[new] = rng.randrange(3)
                sessions.append(new)
            asked = rng.sample(sessions, rng.randrange(1, len(sessions) + 1))
            for one in asked:
                self.proceed(one, seeds, rng)
            wishes = [wish(s, rng.randrange(1, 7), Sampling(seed=seeds[s])) for s in asked]
            for asked_for, found in zip(wishes, draft(source, *wishes), strict=True):
                so_far = asked_for.tokens[: asked_for.length]
                expected = completion(so_far, len(found), seeds[asked_for.session])
                assert found == expected, "a draft of something else than the model's choice"
            for _ in range(rng.randrange(8)):
                plan = source.plan()
                if plan is not None:
                    out = source.run(plan)
                    if rng.random() < 0.2:  # told while the step runs, and asked about later
                        self.proceed(rng.choice(sessions), seeds, rng)
                    source.commit(plan, *out)
                    check(source)
            if rng.random() < 0.15:
                ended = sessions.pop(rng.randrange(len(sessions)))
                source.end(ended)
        for one in sessions:
            source.end(one)
        assert step(source) is None
        assert source._allocator.in_use == 0

    def proceed(self, one: Session, seeds: dict[Session, int], rng: random.Random) -> None:
        """What the target took: some of the model's guesses, and then perhaps something else."""
        if len(one.tokens) > 130:
            one.tokens = one.tokens[: rng.randrange(1, 130)]
        one.tokens += completion(one.tokens, rng.randrange(6), seeds[one])
        if rng.random() < 0.5:
            one.tokens.append(rng.randrange(1000))
        if rng.random() < 0.1:
            one.tokens = [*one.tokens[: rng.randrange(len(one.tokens))], rng.randrange(1000)]
        if rng.random() < 0.1:
            seeds[one] = rng.randrange(3)

    @pytest.mark.parametrize("accepted", range(6))
    @pytest.mark.parametrize("steps_ahead", range(8))
    def test_ahead_or_not_the_drafts_are_the_same(self, accepted: int, steps_ahead: int) -> None:
        found = []
        for ahead in (0, steps_ahead):
            source, _ = watched()
            one = session(prompt(30))
            first = draft(source, wish(one))[0]
            for _ in range(ahead):
                step(source)
            one.tokens += [*first, *completion([*one.tokens, *first], 1)][:accepted]
            one.tokens += [] if accepted == 5 else [999]
            found.append(draft(source, wish(one))[0])
        assert found[0] == found[1] == completion(one.tokens, 4)

    def test_never_beyond_the_context(self) -> None:
        source, _ = watched(context=12)
        one, full, beyond = (session([1] * length, f"a/{length}") for length in (10, 12, 20))
        assert draft(source, wish(one), wish(full), wish(beyond)) == [completion(one.tokens, 2), [], []]
        assert step(source) is None

    def test_penalties_count_what_was_generated_and_guessed(self) -> None:
        sampling = Sampling(repetition_penalty=1.2, frequency_penalty=0.5)
        source, _ = watched()
        seen: list[dict[int, int]] = []

        def note(spans: Sequence[Span]) -> list[list[int]]:
            for span in spans:
                assert span.adjustments is not None
                ids, counts = span.adjustments.counts()
                seen.append(dict(zip(ids, counts, strict=True)))
            return FakeEngine.step(source._engine, spans)  # type: ignore[arg-type]

        source._engine.step = note  # type: ignore[method-assign]
        one = session([1, 2, 3], prompt_len=2)
        g = draft(source, wish(one, 2, sampling))[0]
        assert seen[0] == {1: 0, 2: 0, 3: 1}
        assert seen[1] == {1: 0, 2: 0, 3: 1, g[0]: 1}
        one.tokens += [g[0], 3]
        seen.clear()
        draft(source, wish(one, 1, sampling))
        assert seen[0] == {1: 0, 2: 0, 3: 2, g[0]: 1}


class TestAhead:
    def test_what_continues_as_guessed_is_answered_without_a_step(self) -> None:
        source, engine = watched()
        one = session(prompt(10))
        first = draft(source, wish(one))[0]
        while step(source):
            pass
        before = engine.steps
        one.tokens += [*first, *completion([*one.tokens, *first], 1)]  # all accepted, and the bonus token as guessed
        source.want(wish(one), 4)
        assert not source.waits(wish(one))
        assert draft(source, wish(one)) == [completion(one.tokens, 4)]
        assert engine.steps == before

    def test_it_rests_at_a_bounded_depth(self) -> None:
        source, engine = watched(context=500)
        one = session(prompt(10))
        draft(source, wish(one, 4))
        while step(source):
            pass
        assert len(source._chains[one].guesses) == 4 + 1 + 4
        steps = engine.steps
        assert step(source) is None
        assert engine.steps == steps

    def test_and_the_sooner_the_less_likely_it_is_of_use(self) -> None:
        lengths = []
        for rate in (0.98, 0.8, 0.6, 0.1):
            source, _ = watched()
            source.record.rates = [rate] * 4
            one = session(prompt(10))
            draft(source, wish(one, 1))
            source.want(wish(one, 8), 0)
            while step(source):
                pass
            lengths.append(len(source._chains[one].guesses))
        assert lengths == [9, 7, 3, 1]

    def test_a_new_wish_waits_for_one_step_at_most(self) -> None:
        """Guessing ahead and reading stop for whoever is waited for."""
        source, engine = watched(blocks=400, context=1000)
        ahead, long, late = session(prompt(10)), session(prompt(600, 1), "a/l"), session(prompt(12, 2), "a/n")
        draft(source, wish(ahead))
        source.want(wish(long), 0)
        running = source.plan()
        assert running is not None
        source.want(wish(late), 1)  # comes while a step runs
        source.commit(running, *source.run(running))
        plan = step(source)
        assert plan is not None
        assert plan.sessions == (late,)
        assert source.ready(wish(late)) == completion(late.tokens, 1)
        assert engine.positions == [12]

    def test_asks_that_come_later_join_the_next_step(self) -> None:
        source, engine = watched()
        first, second = session(prompt(8)), session(prompt(9, 1), "b/s")
        source.want(wish(first), 4)
        step(source)
        source.want(wish(second), 2)
        step(source)
        assert len(engine.positions) == 2
        step(source)
        assert not source.waits(wish(second))

    def test_who_is_read_for_has_his_turn_among_many_who_are_not(self) -> None:
        source, _ = watched(blocks=400, context=1000)
        long = session(prompt(600, 1), "a/l")
        asked = wish(long)
        source.want(asked, 1)
        busy = session(prompt(8))
        for _ in range(40 * READ_EVERY):
            source.want(wish(busy), 1)
            step(source)
            busy.tokens.append(7)
            if not source.waits(asked):
                break
        assert source.ready(asked) == completion(long.tokens, 1)

    def test_the_newest_wish_of_a_session_counts(self) -> None:
        source, _ = watched()
        one = session(prompt(8))
        old = wish(one)
        source.want(old, 4)
        step(source)
        one.tokens.append(3)
        source.want(wish(one), 4)
        step(source)
        assert not source.waits(old)
        assert source.ready(old) == []


class TestPrefixes:
    def drafted(self, source: ModelSource, one: Session, engine: FakeEngine) -> int:
        before = engine.tokens_computed
        assert draft(source, wish(one, 1)) == [completion(one.tokens, 1)]
        return engine.tokens_computed - before

    def test_a_prompt_that_begins_as_an_earlier_one_is_read_from_there_on(self) -> None:
        source, engine = watched(blocks=200)
        common = prompt(64)
        assert self.drafted(source, session([*common, *prompt(9, 1)], "a/1"), engine) == 73
        assert self.drafted(source, session([*common, *prompt(9, 2)], "a/2"), engine) == 9

    def test_also_after_that_one_has_ended(self) -> None:
        source, engine = watched(blocks=200)
        one = session(prompt(64), "a/1")
        self.drafted(source, one, engine)
        source.end(one)
        assert self.drafted(source, session(prompt(64), "a/2"), engine) == 4

    @pytest.mark.parametrize(("name", "salt"), [("b/2", ""), ("a/2", "x"), ("2", "")])
    def test_but_not_across_tenants_and_salts(self, name: str, salt: str) -> None:
        source, engine = watched(blocks=200)
        self.drafted(source, session(prompt(64), "a/1"), engine)
        assert self.drafted(source, session(prompt(64), name, salt), engine) == 64

    def test_guesses_are_never_found_by_others(self) -> None:
        source, engine = watched(blocks=200)
        one = session(prompt(10), "a/1")
        first = draft(source, wish(one, 12))[0]
        while step(source):
            pass
        assert self.drafted(source, session([*one.tokens, *first], "a/2"), engine) == 22 - 8

    def test_nor_is_what_is_told_while_a_step_runs_taken_for_what_it_computes(self) -> None:
        source, engine = watched(blocks=200)
        one = session(prompt(10), "a/1")
        draft(source, wish(one, 2))
        assert source._chains[one].computed == 11
        plan = source.plan()  # fills the third block, with guesses
        assert plan is not None
        one.tokens += [999] * 10
        source.commit(plan, *source.run(plan))
        assert self.drafted(source, session([*one.tokens, 5], "a/2"), engine) == 21 - 8

    def test_two_that_read_the_same_at_once_end_well(self) -> None:
        source, _ = watched(blocks=200)
        both = [session(prompt(40), "a/1"), session(prompt(40), "a/2")]
        for _ in range(3):
            assert draft(source, *(wish(s) for s in both)) == [completion(s.tokens, 4) for s in both]
            for n, one in enumerate(both):
                one.tokens += [n]
        for one in both:
            source.end(one)
        step(source)
        assert source._allocator.in_use == 0


class TestPool:
    def test_a_pool_smaller_than_the_batch_serves_those_that_fit(self) -> None:
        """In every round somebody is served, though all of them hold blocks and want more."""
        source, _ = watched(blocks=16, block_size=4)
        sessions = [session(prompt(20, n), f"a/{n}") for n in range(4)]
        for _ in range(8):
            found = draft(source, *(wish(s) for s in sessions))
            assert any(found)
            for one, drafts in zip(sessions, found, strict=True):
                assert drafts == completion(one.tokens, len(drafts))
                one.tokens += completion(one.tokens, 2)

    def test_a_full_pool_costs_the_session_least_recently_drafted_for_its_kv(self) -> None:
        source, engine = watched(blocks=16, block_size=4)
        source.record.rates = [0.1] * 4  # nothing ahead
        a, b, c = (session(prompt(20, n), f"a/{n}") for n in range(3))
        for one in (a, b, a, c):  # 6 blocks each
            draft(source, wish(one))
        assert set(source._chains) == {a, c}
        before = engine.tokens_computed
        a.tokens.append(5)
        draft(source, wish(a, 1))
        assert engine.tokens_computed == before + 1, "the KV of the session asked about last was gone"

    def test_a_sequence_larger_than_the_pool_costs_the_others_nothing(self) -> None:
        source, _ = watched(blocks=16, block_size=4)
        small, large = session(prompt(20)), session(prompt(70), "b/s")
        draft(source, wish(small))
        assert draft(source, wish(large)) == [[]]
        assert large not in source._chains

    def test_guessing_ahead_takes_nobodys_blocks(self) -> None:
        source, _ = watched(blocks=13, block_size=4)
        first, second = session(prompt(20)), session(prompt(24, 1), "b/s")
        draft(source, wish(first, 4))
        draft(source, wish(second, 1))
        while step(source):
            pass
        assert first in source._chains
        assert second in source._chains


class TestFailures:
    def test_those_to_blame_lose_what_is_held_of_them_the_others_go_on(self) -> None:
        source, _ = watched()
        a, b = session(prompt(10), "a/1"), session(prompt(10, 1), "a/2")
        source.want(wish(a), 2)
        source.want(wish(b), 2)
        plan = source.plan()
        assert plan is not None
        source.fail(plan, BadSpans((0,)))
        assert not source.waits(wish(a))
        assert set(source._chains) == {b}
        check(source)

    def failing(self, source: ModelSource) -> list[int]:
        """Step to the end; returns how many sessions each step was of that failed."""
        failed: list[int] = []
        for _ in range(200):
            if (plan := source.plan()) is None:
                return failed
            try:
                source.commit(plan, *source.run(plan))
            except RuntimeError as error:
                failed.append(len(plan.sessions))
                source.fail(plan, error)
            check(source)
        raise AssertionError("it never ends")

    def test_one_that_the_model_cannot_run_costs_its_neighbours_neither_drafts_nor_kv(self) -> None:
        source, engine = watched(blocks=200)
        engine.poison = 999
        sessions = [session(prompt(30, n), f"a/{n}") for n in range(5)]
        for found, one in zip(draft(source, *(wish(s) for s in sessions)), sessions, strict=True):
            one.tokens += found
        sessions[2].tokens[-1] = 999
        before = engine.tokens_computed
        for one in sessions:
            source.want(wish(one), 4)
        assert self.failing(source) == [5, 1]
        for one in sessions:
            assert source.ready(wish(one)) == ([] if one is sessions[2] else completion(one.tokens, 4))
        assert engine.tokens_computed - before < 4 * 14, "prompts were read again"

    def test_it_is_not_drafted_for_again_and_ruins_no_step_any_more(self) -> None:
        source, engine = watched()
        engine.poison = 999
        bad, good = session([*prompt(9), 999], "a/1"), session(prompt(10, 1), "a/2")
        for one in (bad, good):
            source.want(wish(one), 2)
        assert self.failing(source) == [2, 1]
        for turn in range(3):
            bad.tokens.append(turn)
            good.tokens.append(turn)
            assert (source.room(wish(bad)), source.behind(wish(bad))) == (0, 0.0)
            source.want(wish(bad), 2)
            source.want(wish(good), 2)
            assert not source.waits(wish(bad))
            assert self.failing(source) == []
            assert source.ready(wish(good)) == completion(good.tokens, 4)
            assert set(source._chains) == {good}

    def test_a_wish_that_came_while_its_step_failed_is_not_begun(self) -> None:
        source, engine = watched()
        engine.poison = 999
        bad = session([*prompt(9), 999])
        source.want(wish(bad), 2)
        plan = source.plan()
        assert plan is not None
        source.want(wish(bad), 2)
        source.fail(plan, RuntimeError())
        assert not source.waits(wish(bad))
        assert source.plan() is None

    def test_a_step_that_fails_once_bars_nobody(self) -> None:
        source, engine = watched()
        both = [session(prompt(10, n), f"a/{n}") for n in range(2)]
        for one in both:
            source.want(wish(one), 2)
        plan = source.plan()
        assert plan is not None
        source.fail(plan, RuntimeError())
        for alone in (1, 1, 2):
            step(source)
            assert len(engine.positions) == alone
        assert [source.ready(wish(s))[:2] for s in both] == [completion(s.tokens, 2) for s in both]

    def test_what_is_known_of_the_bad_ends_with_their_sessions(self) -> None:
        source, _ = watched()
        sessions = [session(prompt(10, n), f"a/{n}") for n in range(3)]
        for one in sessions:
            source.want(wish(one), 2)
        plan = source.plan()
        assert plan is not None
        source.fail(plan, BadSpans((0,)))
        source.want(wish(sessions[1]), 2)
        plan = source.plan()
        assert plan is not None
        source.fail(plan, RuntimeError())
        for one in sessions:
            source.end(one)
        assert step(source) is None
        assert not source._blame.barred
        assert not source._blame.suspects

    def test_a_session_that_ends_while_its_step_runs_is_gone_with_the_next(self) -> None:
        source, _ = watched()
        one = session(prompt(10))
        source.want(wish(one), 2)
        plan = source.plan()
        assert plan is not None
        source.end(one)
        source.commit(plan, *source.run(plan))
        assert step(source) is None
        assert not source._chains
        assert source._allocator.in_use == 0


def test_a_long_prompt_is_read_in_pieces_that_take_about_as_long_as_two_steps() -> None:
    source, _ = watched(blocks=600, context=2100)
    source.step_s, source._token_s = 0.01, 0.0002
    one = session(prompt(1000))
    source.want(wish(one), 0)
    plan = source.plan()
    assert plan is not None
    assert SHORT < len(plan.spans[0].token_ids) == 100
    assert source.behind(wish(one)) == pytest.approx(999 * 0.02)


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40), st.integers(0, 40))
def test_common_prefix(a: list[int], b: list[int], shared: int) -> None:
    b = a[:shared] + b
    equal = [x == y for x, y in zip(a, b, strict=False)]
    assert common_prefix(a, b) == (equal.index(False) if False in equal else len(equal))
