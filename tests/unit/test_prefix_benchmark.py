"""The prefix benchmark asks what it says it asks, counts rightly, and refuses what it did not mean to measure."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.bars import judged
from benchmarks.prefix import PARTS
from benchmarks.prefix_fleet import Answer
from benchmarks.prefix_runs import HOST, NATS, POOL, Stage, Tier, cached_share, overhead, require_warm, without_cache
from benchmarks.prefix_sets import Ask, agent_set, best_share, rag_set, reading
from shared.config import DEFAULT_MODEL
from shared.engine.weights import resolve
from shared.tokenizer import Tokenizer

WARM = Answer(9.0, 1024, 1008, "decode-2", ())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve(DEFAULT_MODEL))


@pytest.mark.parametrize("size", [512, 1024, 2048, 4096])
def test_a_reading_has_exactly_its_size(tokenizer: Tokenizer, size: int) -> None:
    readings = [reading(tokenizer, number, size) for number in range(15)]
    assert {len(tokenizer.encode(text)) for text in readings} == {size}
    assert readings[3] == reading(tokenizer, 3, size)


def test_readings_have_no_block_in_common(tokenizer: Tokenizer) -> None:
    first = {tuple(tokenizer.encode(reading(tokenizer, number, 32))[:16]) for number in range(100)}
    assert len(first) == 100


def test_the_rag_set_has_40_short_questions_over_5_contexts(tokenizer: Tokenizer) -> None:
    asks = rag_set()
    assert Counter(ask.group for ask in asks) == dict.fromkeys(range(5), 8)
    assert len({ask.system for ask in asks}) == 5
    assert len({(ask.group, ask.user) for ask in asks}) == 40
    for ask in asks:
        assert 1500 < len(tokenizer.encode(ask.system)) < 1850
        assert len(tokenizer.encode(ask.user)) < 20
    assert rag_set() == asks


def test_the_agent_set_has_40_short_tasks_for_one_list_of_tools(tokenizer: Tokenizer) -> None:
    asks = agent_set()
    assert len({ask.user for ask in asks}) == len(asks) == 40
    (system,) = {ask.system for ask in asks}
    assert 1000 < len(tokenizer.encode(system)) < 1450
    assert max(len(tokenizer.encode(ask.user)) for ask in asks) < 40


@pytest.mark.parametrize("asks", [rag_set(), agent_set()], ids=["rag", "agent"])
def test_the_shares_that_are_asked_for_can_be_reached(tokenizer: Tokenizer, asks: list[Ask]) -> None:
    assert 0.855 < best_share([tokenizer.chat(ask.messages) for ask in asks], 16) < 0.96


def test_the_best_share_counts_whole_blocks_and_never_the_last_token() -> None:
    assert best_share([[1, 2, 3, 4], [1, 2, 3, 4]], 2) == 2 / 8
    assert best_share([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], 2) == 4 / 10
    assert best_share([[1, 2, 3, 4], [9, 2, 3, 4]], 2) == 0
    assert best_share([[1, 2, 3, 4], [1, 2, 9, 4], [1, 2, 9, 4, 5]], 2) == (2 + 4) / 13


def test_requests_without_cache_are_spread_evenly() -> None:
    chosen = sorted(without_cache(40, 8))
    assert len(chosen) == 8
    assert {b - a for a, b in pairwise(chosen)} == {5}
    assert set(chosen) < set(range(40))


def test_ratios_are_of_medians() -> None:
    stage = Stage(cold=[100.0, 200.0, 900.0], warm=[10.0, 90.0, 20.0])
    assert stage.as_dict() == {"cold_ttft_ms": 200.0, "warm_ttft_ms": 20.0, "warm_over_cold": 0.1}


def test_shares_are_of_all_tokens() -> None:
    answers = [Answer(1.0, 100, 0, "decode-1", ()), Answer(1.0, 300, 300, "decode-2", ())]
    assert cached_share(answers) == 0.75
    assert overhead(2000.0, 1700.0) == 0.15


@pytest.mark.parametrize(
    ("tier", "counted"), [(POOL, {}), (HOST, {"cache_host_hit": 63}), (NATS, {"cache_hit": 63, "other": 1})]
)
def test_a_warm_answer_from_the_right_tier_counts(tier: Tier, counted: dict[str, int]) -> None:
    require_warm(WARM, tier, counted)


@pytest.mark.parametrize(
    ("tier", "counted"),
    [
        (POOL, {"cache_host_hit": 63}),
        (HOST, {}),
        (HOST, {"cache_host_hit": 62, "cache_hit": 1}),
        (HOST, {"cache_host_hit": 63, "cache_hit": 1}),
        (NATS, {"cache_host_hit": 63}),
    ],
)
def test_a_warm_answer_from_another_tier_does_not(tier: Tier, counted: dict[str, int]) -> None:
    with pytest.raises(SystemExit, match="blocks came from"):
        require_warm(WARM, tier, counted)


@pytest.mark.parametrize(("cached", "prefill"), [(992, ()), (1008, ("prefill-1",))])
def test_an_answer_that_was_computed_again_is_not_warm(cached: int, prefill: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        require_warm(Answer(9.0, 1024, cached, "decode-2", prefill), POOL, {})


@pytest.mark.parametrize(("cached", "prefill"), [(16, ("prefill-1",)), (0, ()), (0, ("prefill-1", "prefill-2"))])
def test_an_answer_not_computed_by_the_prefill_worker_is_not_cold(cached: int, prefill: tuple[str, ...]) -> None:
    Answer(9.0, 1024, 0, "decode-1", ("prefill-1",)).require_cold()
    with pytest.raises(SystemExit):
        Answer(9.0, 1024, cached, "decode-1", prefill).require_cold()


@pytest.mark.parametrize("part", PARTS)
def test_every_bar_can_be_missed(part: str) -> None:
    bars = PARTS[part].bars
    met = {name: bar for name, (_, bar) in bars.items()}
    assert all(verdict["passed"] for verdict in judged(met, bars).values())
    for name, (sign, bar) in bars.items():
        missed = judged(met | {name: bar * (1.01 if sign == "<=" else 0.99)}, bars)
        assert [n for n, verdict in missed.items() if not verdict["passed"]] == [name]
