"""The simulation of fleets: its clock, what it takes from calibration, and that every request ends as it should."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate import SHIPPED, apart, findings, shown
from benchmarks.simulate_check import Real, compared, played
from benchmarks.simulate_clock import Bus, BusRates, Clock, Machine
from benchmarks.simulate_costs import PARTS, Costs, fitted, load, parts, scaled
from benchmarks.simulate_fleet import Fleet
from benchmarks.simulate_world import BLOCK, Load, Shape
from shared.engine.span import Span
from shared.errors import ConfigError

WEIGHTS = dict(zip(PARTS, (0.04, 0.004, 0.003, 0.001, 0.0005, 0.0005, 1e-6, 2e-7), strict=True))
COSTS = Costs(WEIGHTS, 0.1, 2, 737_280, 0.002, 0.01, 0.004, 0.0015, 0.7)


def test_the_clock_runs_calls_in_order_of_time() -> None:
    clock = Clock()
    seen: list[str] = []

    def first() -> None:
        seen.append("a")
        clock.after(1, lambda: seen.append("c"))

    clock.after(2, lambda: seen.append("b"))
    clock.after(1, first)
    clock.run(lambda: False, 1.5)
    assert seen == ["a"]
    clock.run(lambda: False, 9)
    assert seen == ["a", "b", "c"] and clock.now == 2


@pytest.mark.parametrize(("cores", "contention", "ends"), [(1, 0.0, [2, 3]), (2, 0.0, [1, 2]), (2, 0.5, [1.5, 2.5])])
def test_tasks_share_a_machine(cores: int, contention: float, ends: list[float]) -> None:
    clock = Clock()
    seen: list[float] = []
    machine = Machine(clock, cores, contention)
    machine.run(1, lambda: seen.append(clock.now))
    machine.run(2, lambda: seen.append(clock.now))
    clock.run(lambda: False, 9)
    assert seen == pytest.approx(ends)


def test_a_bus_serves_one_message_after_another() -> None:
    clock = Clock()
    seen: list[float] = []
    bus = Bus(clock, BusRates(100, 50, 0.0, 0.5))
    for size in (100, 100):
        bus.send(size, 1, lambda: seen.append(clock.now))
    clock.run(lambda: False, 99)
    assert seen == pytest.approx([2.5, 2.5])  # each link takes 2 s, the server 1 s for each
    bus.send(400, 1, lambda: seen.append(clock.now))
    clock.run(lambda: False, 99)
    assert seen[2] == pytest.approx(2.5 + 8.5)
    assert bus.busy_s == pytest.approx(6)
    slow, ends = Bus(clock, BusRates(100, 1e9, 0.0, 0.0)), []
    began = clock.now
    for size in (100, 300):
        slow.send(size, 1, lambda: ends.append(clock.now - began))
    clock.run(lambda: False, 99)
    assert ends == pytest.approx([1, 4])  # the second waits for the first


def test_calibration_finds_the_weights_again() -> None:
    shapes = [(n, c, d) for n in (1, 2, 4, 8) for c in (64, 512) for d in (0, 3)]
    steps = [[Span((1,) * (1 + d), c, (), 1 + d)] * n for n, c, d in shapes]
    steps += [[Span((1,) * t, start, ())] for t in (16, 64, 256) for start in (0, 512)]
    weights, fit = fitted([(parts(step), COSTS.step_s(step)) for step in steps])
    assert fit["largest"] < 0.02 and min(weights.values()) >= 0
    for step in steps:
        assert replace(COSTS, weights=weights).step_s(step) == pytest.approx(COSTS.step_s(step), rel=0.02)


def test_the_costs_that_ship(tmp_path) -> None:
    costs = load(SHIPPED)
    assert costs.machine["cpu"] and costs.fit["median"] < 0.1
    costs.save(tmp_path / "costs.json")
    assert load(tmp_path / "costs.json") == costs
    (tmp_path / "costs.json").write_text("{}")
    with pytest.raises(ConfigError):
        load(tmp_path / "costs.json")


def test_one_request_takes_what_its_steps_take() -> None:
    result = Fleet(Shape(0, 1), COSTS).run(Load(1, 64, 9, concurrency=1))
    rates, host = BusRates(), COSTS.host_s
    prompt = COSTS.step_s([Span((1,) * 64, 0, (), 1)]) + host
    assert result.ttft_s[0] == pytest.approx(2 * rates.latency_s + COSTS.intake_s + prompt)
    later = [COSTS.step_s([Span((1,), 63 + i, (), 1)]) + host for i in range(1, 9)]
    assert result.tpot_s[0] == pytest.approx(sum(later) / 8)
    assert result.limit == "decode" and result.tokens == 9


def ran(shape: Shape, ask: Load, costs: Costs = COSTS) -> tuple[Fleet, dict[str, Any]]:
    fleet = Fleet(shape, costs)
    result = fleet.run(ask)
    assert result.requests == ask.requests and result.tokens == ask.requests * ask.output
    for worker in fleet._decode:
        worker.scheduler.check_integrity()
    for prefiller in fleet._prefill:
        prefiller._scheduler.check_integrity()
    return fleet, result.as_dict()


@settings(max_examples=12, deadline=None)
@given(
    st.builds(
        Shape,
        prefill=st.integers(0, 2),
        decode=st.integers(1, 3),
        drafter=st.integers(0, 1),
        machines=st.integers(1, 2),
        pool_blocks=st.sampled_from([40, 400]),
        stream_bytes=st.sampled_from([1 << 20, 1 << 30]),
        machine_bytes=st.sampled_from([0, 1 << 30]),
    ),
    st.builds(
        Load,
        requests=st.integers(1, 12),
        prompt=st.integers(1, 400),
        output=st.integers(1, 24),
        concurrency=st.integers(1, 12),
        shared=st.sampled_from([0.0, 0.8]),
        groups=st.integers(1, 3),
    ),
)
def test_every_request_ends_with_all_its_tokens(shape: Shape, ask: Load) -> None:
    ran(shape, ask)


def test_more_decode_workers_give_more_tokens() -> None:
    rates = [ran(Shape(0, n), Load(24, 64, 24, concurrency=16), apart(COSTS))[1]["tokens_per_s"] for n in (1, 2, 4)]
    assert rates[0] * 1.2 < rates[1] and rates[1] * 1.2 < rates[2]


def test_shared_prefixes_are_found_in_every_tier() -> None:
    ask = Load(24, 640, 8, rate=0.5, shared=0.8, groups=4)
    _, cold = ran(Shape(1, 1, machines=2), replace(ask, shared=0.0))
    fleet, warm = ran(Shape(1, 1, machines=2), ask)
    found = [w.hits.pool + w.hits.machine + w.hits.nats + w.hits.prefill + w.hits.computed for w in fleet._decode]
    assert sum(found) == 24 * 640 // BLOCK  # each block of each prompt comes from somewhere, once
    assert warm["ttft_ms"]["p50"] < 0.7 * cold["ttft_ms"]["p50"]
    assert warm["prompt_blocks"]["pool"] + warm["prompt_blocks"]["machine"] + warm["prompt_blocks"]["nats"] > 0.4
    _, far = ran(Shape(1, 1, machines=2, machine_bytes=0, pool_blocks=100), ask)
    assert far["prompt_blocks"]["nats"] > warm["prompt_blocks"]["nats"] and far["prompt_blocks"]["machine"] == 0
    assert cold["prompt_blocks"]["prefill"] > 0.9
    fetched = warm["nats_mb_per_s"] * warm["seconds"] * 1e6
    assert fetched >= 24 * 128 // BLOCK * COSTS.block_bytes  # at least all that is no one's else is published


def test_right_drafts_make_answers_faster() -> None:
    ask = Load(4, 64, 96, concurrency=1)
    _, plain = ran(Shape(0, 1), ask)
    _, drafted = ran(Shape(0, 1, 1), ask, replace(COSTS, acceptance=0.9))
    _, wrong = ran(Shape(0, 1, 1), ask, replace(COSTS, acceptance=0.0))
    assert drafted["tpot_ms"]["p50"] < 0.75 * plain["tpot_ms"]["p50"]
    assert wrong["tpot_ms"]["p50"] < 1.1 * plain["tpot_ms"]["p50"]


def test_fast_machines_make_nats_the_limit() -> None:
    _, row = ran(Shape(1, 1, machines=4), Load(24, 512, 8, concurrency=12), scaled(COSTS, 100))
    assert row["limit"] == "NATS"


def test_what_is_shown() -> None:
    rows = [("one", ran(Shape(1, 1), Load(2, 300, 4, concurrency=1))[1])]
    lines = shown("title", rows).splitlines()
    assert lines[1] == "title" and lines[3].split()[0] == "one" and "100% prefill" in lines[4]
    assert json.dumps(dict(rows), allow_nan=False)
    busy = {**rows[0][1], "busy": {"NATS": 1.2}, "tokens_per_s": 3 * rows[0][1]["tokens_per_s"]}
    assert findings({"t": [*rows, ("two", busy)]}) == [
        "t: from one to two 3.00 times the tokens; NATS is the limit from two on"
    ]


def test_errors_against_real_runs() -> None:
    asked = Load(2, 64, 9, concurrency=1)
    result = Fleet(Shape(0, 1), COSTS).run(asked)
    real = [Real(result.tokens_per_s * f, 100.0, 50.0, asked) for f in (0.5, 1.25, 2.0)]
    assert compared(real, [result])["tokens_per_s"]["error"] == pytest.approx(-0.2)


@pytest.mark.parametrize("acceptance", [0.3, 0.9])
def test_drafts_are_right_as_often_as_real_ones_were(acceptance: float) -> None:
    """A share of all drafts is lower than the chance of one of them, as all that follow a wrong one are wrong."""
    shape, asked = Shape(0, 1, 1), Load(6, 64, 96, concurrency=1)
    real = Fleet(shape, COSTS).run(replace(asked, acceptances=(acceptance,) * 6))
    share = real.accepted / real.drafted
    again = played(shape, COSTS, Real(real.tokens_per_s, 0.0, 0.0, asked, (share,) * 6))
    assert share < acceptance and again.tokens_per_s == pytest.approx(real.tokens_per_s, rel=0.05)


def test_requests_whose_drafts_differ() -> None:
    asked = Load(2, 64, 96, concurrency=1, acceptances=(0.0, 0.95))
    result = Fleet(Shape(0, 1, 1), COSTS).run(asked)
    assert result.tpot_s[1] < 0.7 * result.tpot_s[0]
