"""What readings of an idle fleet say: growth and what is kept, each found where it is and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from benchmarks.soak_load import WEIGHTS, asks
from benchmarks.soak_readings import BARS, Done, Process, Reading, growth, judge, slope

IDLE = Reading(
    {"decode-1": Process(500_000_000, 20, 8), "nats-server": Process(50_000_000, 30, 9)},
    free_blocks=100,
    requests=0,
    consumers=7,
    subscriptions=160,
    connections=17,
    stored=2_000_000,
)
ROUNDS = [Done({"whole": 9, "cancel": 3}, seconds=4.0, blocks_in_use=50) for _ in range(3)]


def grown(reading: Reading, name: str, **changes: int) -> Reading:
    """With these fields of one process larger by so much."""
    process = reading.processes[name]
    larger = replace(process, **{field: getattr(process, field) + more for field, more in changes.items()})
    return replace(reading, processes={**reading.processes, name: larger})


def missed(*readings: Reading, rounds: list[Done] = ROUNDS) -> set[str]:
    result = judge(readings, rounds)
    return {name for name, bar in result["bars"].items() if not bar["passed"]}


def test_a_fleet_that_is_as_before_passes() -> None:
    assert missed(IDLE, IDLE, IDLE, IDLE) == set()
    assert judge([IDLE] * 4, ROUNDS)["bars"].keys() == BARS.keys()


def test_memory_may_grow_into_the_first_round_but_not_over_the_rounds() -> None:
    more = grown(IDLE, "nats-server", rss=10_000_000)
    assert missed(IDLE, more, more, more) == set()
    assert missed(IDLE, IDLE, more, IDLE) == {"rss_growth"}, "down again is no excuse for growth"
    steps = [grown(IDLE, "decode-1", rss=step * 8_000_000) for step in range(4)]  # 1.6 % a round, 3.2 % over all
    assert missed(*steps) == {"rss_growth"}


@pytest.mark.parametrize(
    ("changes", "bar"),
    [
        ({"free_blocks": 99}, "blocks_kept"),
        ({"requests": 1}, "requests_kept"),
        ({"consumers": 8}, "consumers_kept"),
        ({"subscriptions": 161}, "subscriptions_kept"),
        ({"connections": 18}, "connections_kept"),
    ],
)
def test_what_one_round_keeps_is_missed(changes: dict[str, Any], bar: str) -> None:
    assert missed(IDLE, IDLE, replace(IDLE, **changes), IDLE) == {bar}


def test_one_process_with_a_handle_more_is_enough() -> None:
    assert missed(IDLE, IDLE, IDLE, grown(IDLE, "decode-1", handles=1)) == {"handles_kept"}


def test_a_request_that_failed_is_told() -> None:
    rounds = [*ROUNDS[:2], Done({"whole": 9}, ["whole: Unavailable: no"])]
    assert missed(IDLE, IDLE, IDLE, IDLE, rounds=rounds) == {"requests_failed"}
    assert judge([IDLE] * 4, rounds)["failures"] == ["whole: Unavailable: no"]


def test_growth_and_slope() -> None:
    assert growth([100, 103, 101]) == pytest.approx(0.03)
    assert growth([100, 90, 99]) == pytest.approx(0.1)
    assert slope([1.0, 3.0, 5.0]) == pytest.approx(2.0)
    assert slope([5.0, 1.0, 5.0]) == pytest.approx(0.0)


def test_rounds_are_equal_and_share_no_block() -> None:
    first, second = list(islice(asks("round 1"), 300)), list(islice(asks("round 2"), 300))
    assert {ask.kind for ask in first} == WEIGHTS.keys()
    for one, other in zip(first, second, strict=True):
        assert replace(one, prompt=one.prompt.replace("round 1", "round 2")) == other
        assert one.prompt[:8] != other.prompt[:8]
    starts = [ask.prompt[:200] for ask in first if len(ask.prompt) > 200]
    assert len(set(starts)) < len(starts) / 2, "no prefix is asked twice"
