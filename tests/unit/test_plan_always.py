"""`trine plan`, for any load: it never contradicts itself, and more to do never needs fewer workers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trine.forecast import WORTH
from trine.plan import by_codec, by_roles, plan
from trine.plan_bus import LINK_RATE, fetch_s
from trine.plan_cost import Costs, Drafting
from trine.plan_decode import BUSY, Decoding
from trine.plan_design import designed, waiting_s
from trine.plan_hardware import Hardware, named
from trine.plan_hardware import given as machine
from trine.plan_load import Load
from trine.plan_model import ModelShape
from trine.plan_told import as_dict
from trine.plan_told import settings as settings_of

LLAMA = ModelShape("llama-8b", 32, 32, 8, 128, 128, 8.03e9, 8.03e9)
SMOL = ModelShape("smollm2-135m", 30, 9, 3, 64, 64, 134_515_008, 134_515_008, 4, 4)
MIXED = ModelShape("mixed", 32, 32, 8, 128, 128, 46.7e9, 12.9e9)
CORE = machine(24, 13, 0.075, cpu=True)


def between(low: float, high: float) -> st.SearchStrategy[float]:
    """Any size about as often."""
    return st.floats(math.log(low), math.log(high)).map(math.exp)


LOADS = st.builds(
    Load,
    requests_per_s=between(0.01, 500),
    prompt=between(1, 20_000),
    output=between(1, 4_000),
    ttft_s=between(0.05, 20),
    tpot_s=between(0.005, 1),
    shared=st.floats(0, 1),
    drafting=st.builds(Drafting, acceptance=st.sampled_from([0.0, 0.3, 0.8]), cost=st.floats(0.01, 0.5)),
    one_machine=st.booleans(),
)
PLACES = st.sampled_from([(LLAMA, named("l4")), (LLAMA, named("h200")), (MIXED, named("h200")), (SMOL, CORE)])
Place = tuple[ModelShape, Hardware]


@settings(max_examples=25, deadline=None)
@given(LOADS, PLACES, st.sampled_from(["none", "int8", "int4", "auto"]))
def test_a_plan_never_contradicts_itself(load: Load, place: Place, codec: str) -> None:
    found = plan(*place, load, codec)
    workers, fleets, sets = found.workers, found.traffic.fleets, settings_of(found)
    page = json.loads(json.dumps(as_dict(found), allow_nan=False))
    says = {one["technique"].split()[0]: one["on"] for one in page["advice"]}
    if not found.problems:
        assert found.ttft_s <= load.ttft_s and found.usual.tpot_s <= load.tpot_s * (1 + 1e-9)
        assert found.usual.rate >= load.requests_per_s * load.output / workers.decode * (1 - 1e-9)
        assert workers.decode >= max(fleets, found.traffic.got / (LINK_RATE * BUSY))
        assert workers.prefill >= fleets or not workers.prefill
    assert math.isfinite(found.ttft_s) or found.problems
    assert all(found.rank <= one.rank for one in by_roles(found.costs, load))
    assert says["prefix"] or sets["TRINE_CACHE_BYTES"] == str(1 << 30), "no room for what does not pay"
    assert says["prefill"] == (workers.prefill > 0) and says["one"] == (fleets == 1)
    assert says["KV"] == (found.rank < by_codec(found)[0].rank)
    assert says["speculation"] == (found.usual.depth > 0) == (sets["TRINE_DRAFT_DEPTH"] != "0")
    assert workers.drafter >= (fleets if says["speculation"] else 0)
    assert says["speculation"] or workers.drafter == found.full.depth == 0
    if says["speculation"]:
        assert found.trial is not None and found.trial.gain >= WORTH and found.trial.workers == workers.decode
    assert max(found.full.positions, found.usual.positions) <= int(sets["TRINE_STEP_TOKENS"])
    assert found.usual.sequences <= found.full.sequences == int(sets["TRINE_MAX_RUNNING"])
    assert found.chunk >= 16 and page["settings"] == sets


@settings(max_examples=60, deadline=None)
@given(LOADS, st.sampled_from(["requests_per_s", "ttft_s"]), st.floats(1.01, 5), PLACES)
def test_more_to_do_never_needs_fewer_workers(load: Load, what: str, by: float, place: Place) -> None:
    easy = replace(load, drafting=Drafting())
    value = getattr(load, what) * by if what == "requests_per_s" else getattr(load, what) / by
    some, more = plan(*place, easy), plan(*place, replace(easy, **{what: value}))
    assume(not some.problems and not more.problems)
    assert more.workers.machines >= some.workers.machines


HARDER = st.sampled_from(["requests_per_s", "prompt", "output", "ttft_s", "tpot_s", "shared"])


@settings(max_examples=60, deadline=None)
@given(LOADS, HARDER, st.floats(1.01, 5), PLACES)
def test_decode_workers_alone_are_never_fewer(load: Load, what: str, by: float, place: Place) -> None:
    costs = Costs(*place, "none")
    if what == "shared":  # and fetching pays, at any length
        load = replace(load, one_machine=True)
        assume(fetch_s(costs, load) < 1 / costs.prefill_rate(0))
    easy = replace(load, drafting=Drafting())
    up = what in ("requests_per_s", "prompt", "output")
    value = getattr(load, what) * by if up else getattr(load, what) / by
    some, more = (designed(costs, one, apart=False) for one in (easy, replace(easy, **{what: value})))
    assume(not some.problems and not more.problems)
    assert more.workers.decode >= some.workers.decode


@settings(max_examples=60, deadline=None)
@given(LOADS, st.integers(2, 7), PLACES, st.booleans())
def test_times_the_load_needs_no_more_than_times_the_workers(load: Load, times: int, place: Place, apart: bool) -> None:
    costs, easy = Costs(*place, "none"), replace(load, drafting=Drafting())
    some = designed(costs, easy, apart=apart)
    more = designed(costs, replace(easy, requests_per_s=times * easy.requests_per_s), apart=apart)
    assume(not some.problems and not more.problems)
    assert more.workers.decode <= times * some.workers.decode
    assert more.workers.prefill <= times * some.workers.prefill


@settings(max_examples=40, deadline=None)
@given(LOADS, PLACES)
def test_fewer_workers_would_not_keep_up(load: Load, place: Place) -> None:
    decoding = Decoding(Costs(*place, "none"), load, load.drafting, 0.0)
    workers = decoding.least()
    if workers is not None and workers > 1:
        assert not decoding.keep_up(workers - 1)
        assert decoding.full(workers - 1).rate * (workers - 1) * BUSY < load.requests_per_s * load.output


@settings(max_examples=40, deadline=None)
@given(st.floats(0.1, 200), st.floats(0.001, 2), st.integers(1, 400))
def test_more_workers_never_wait_longer(per_s: float, service: float, workers: int) -> None:
    assert waiting_s(per_s, service, workers + 1) <= waiting_s(per_s, service, workers)
