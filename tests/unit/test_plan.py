"""`trine plan`: its arithmetic, and what it advises."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.decode import scheduler
from services.decode.config import DecodeSettings
from shared.errors import InvalidField
from trine.forecast import WORTH
from trine.plan import by_roles, plan
from trine.plan_advice import Advice, advice
from trine.plan_bus import LINK_RATE, traffic
from trine.plan_cost import Costs, Drafting
from trine.plan_decode import BUSY, MOST_WORKERS
from trine.plan_design import LOCAL_TOKENS, MIXED_ON_CPU, STEP_TOKENS, Plan, designed, waiting_s
from trine.plan_hardware import given as machine
from trine.plan_hardware import named
from trine.plan_load import Load
from trine.plan_model import ModelShape
from trine.plan_told import as_dict, told
from trine.plan_told import settings as settings_of

LLAMA = ModelShape("llama-8b", 32, 32, 8, 128, 128, 8.03e9, 8.03e9)
SMOL = ModelShape("smollm2-135m", 30, 9, 3, 64, 64, 134_515_008, 134_515_008, 4, 4)
CORE = machine(24, 13, 0.075, cpu=True)
CHAT = Load(5, 1500, 250, 0.5, 0.04, shared=0.5, drafting=Drafting(0.7), one_machine=True)


def by_name(found: Plan) -> dict[str, Advice]:
    return {one.technique: one for one in advice(found)}


def test_a_chat_on_an_h100() -> None:
    found = plan(LLAMA, named("h100"), CHAT)
    assert (found.workers.prefill, found.workers.decode, found.workers.drafter) == (0, 1, 1)
    assert found.costs.codec == "int8", "its blocks would need a second server"
    # 2 × 8.03e9 operations a token and attention, at half of 989 TFLOPS.
    assert 20_000 < found.prefill_rate < 0.5 * 989e12 / (2 * 8.03e9)
    assert found.trial is not None
    # Weights alone: 16.06 GB at 70 % of 3.35 TB/s are 6.8 ms.
    assert found.trial.plain.step_s > 16.06e9 / (0.7 * 3.35e12)
    assert {name: one.on for name, one in by_name(found).items()} == {
        "prefix cache": True,
        "KV codec int8": True,
        "paging": True,
        "speculation": True,
        "prefill workers": False,
        "one NATS server": True,
    }
    assert "NATS" in told(found) and json.dumps(as_dict(found), allow_nan=False)


def test_prefill_workers_are_judged_only_where_they_are_planned() -> None:
    load = Load(1, 4000, 200, 0.5, 0.04)
    found = plan(LLAMA, named("h100"), load)
    together, apart = by_roles(found.costs, load)
    assert "first token" in apart.problems[0], "4,000 tokens take 540 ms over NATS, and then their last chunk"
    assert not found.problems and found.workers.prefill == 0 and found.ttft_s < 0.5
    assert (found.traffic, found.ttft_s) == (together.traffic, together.ttft_s)
    assert "NOT POSSIBLE" in told(found), "of the other design it is told"
    assert not by_name(found)["prefill workers"].on


def test_prefill_workers_are_planned_where_answers_have_no_time_for_prompts() -> None:
    load = Load(2, 1500, 250, 2, 0.1, shared=0.5)
    found = plan(LLAMA, named("l4"), load)
    assert (found.workers.prefill, found.workers.decode) == (1, 2)
    assert by_roles(found.costs, load)[0].workers.decode == 4
    assert by_name(found)["prefill workers"].on


def test_a_decode_worker_that_computes_prompts_has_less_time_for_answers() -> None:
    load = Load(3, 2000, 200, 3, 0.2)
    found = designed(Costs(LLAMA, named("h100"), "int8"), load, apart=False)
    busy = 3 * 2000 / found.prefill_rate / found.workers.decode
    assert found.usual.share == found.full.share == pytest.approx(1 - busy)
    assert found.usual.tpot_s == pytest.approx(found.usual.step_s / (1 - busy))
    assert found.usual.rate >= 3 * 200 / found.workers.decode, "it gives the tokens all the same"
    service = 2000 / found.prefill_rate + math.ceil(2000 / found.chunk) * found.usual.step_s
    assert found.ttft_s == pytest.approx(service + waiting_s(3 / found.workers.decode, service, 1))
    shared = designed(found.costs, replace(load, shared=0.5), apart=False)
    service = 1000 / shared.prefill_rate + math.ceil(1000 / shared.chunk) * shared.usual.step_s
    fetching = 1000 * found.costs.kv_bytes / LINK_RATE
    assert shared.ttft_s == pytest.approx(fetching + service + waiting_s(3 / shared.workers.decode, service, 1))


def test_beside_running_answers_a_cpu_computes_few_tokens_of_a_prompt() -> None:
    settings = DecodeSettings()
    assert (settings.step_tokens, settings.local_prefill_tokens) == (STEP_TOKENS, LOCAL_TOKENS)
    assert MIXED_ON_CPU == scheduler.MIXED_ON_CPU and settings.mixed_tokens == 0
    load = Load(0.02, 1500, 250, 30, 0.5)
    core, gpu = plan(SMOL, CORE, load), plan(LLAMA, named("h100"), load)
    assert core.mixed == MIXED_ON_CPU < core.chunk and gpu.mixed == gpu.chunk
    alone, step = by_roles(core.costs, load)[0], MIXED_ON_CPU / core.prefill_rate
    pause = f"pause for {(alone.usual.step_s + step) * 1e3:,.0f} ms"
    assert pause in by_name(core)["prefill workers"].why[0]


def test_beside_prefill_workers_a_block_of_a_prompt_is_left() -> None:
    found = designed(Costs(LLAMA, named("l4"), "int8"), Load(2, 1500, 250, 2, 0.1, shared=0.5), apart=True)
    assert found.usual.share == pytest.approx(1 - 2 * 16 / found.prefill_rate / found.workers.decode)
    # 750 tokens are fetched by both, the others computed while they are sent, and a chunk's way comes after it.
    fetch = found.costs.kv_bytes / LINK_RATE
    blocks = 2 * 750 * fetch + 750 / found.prefill_rate + 2 * 750 * fetch + 16 / found.prefill_rate
    first = found.ttft_s - waiting_s(2, max(750 / found.prefill_rate, 1500 * fetch), found.workers.prefill)
    assert blocks + found.usual.step_s / 2 < first < blocks + found.full.step_s


def test_what_is_shared_is_a_prompts_beginning() -> None:
    costs = Costs(LLAMA, named("h100"), "none")
    few, all_ = (designed(costs, Load(1, 8000, 200, 9, 0.2, shared=s), apart=False) for s in (0.9, 0.0))
    assert few.prefill_rate == costs.prefill_rate(8000 - 400) < costs.prefill_rate(4000) == all_.prefill_rate


def test_over_nats_a_fast_gpu_computes_sooner_than_it_fetches() -> None:
    far = replace(CHAT, one_machine=False)
    found = plan(LLAMA, named("h100"), far)
    cache = by_name(found)["prefix cache"]
    assert found.load.computed == 750, "workers fetch what there is all the same"
    assert found.traffic.got == pytest.approx(5 * 750 * found.costs.kv_bytes)
    assert not cache.on and "Fetching is slower than computing here" in cache.why[-1]
    assert found.costs.codec == "int8" and found.workers.decode >= found.traffic.fleets == 2
    assert not by_name(found)["one NATS server"].on and "one stream" in by_name(found)["one NATS server"].why[-1]


def test_bytes_on_the_bus() -> None:
    costs, load = Costs(LLAMA, named("h100"), "none"), Load(2, 1000, 100, 1, 1, shared=0.6)
    apart, together = (traffic(costs, load, remote=remote) for remote in (True, False))
    each = 2 * costs.kv_bytes
    near = traffic(costs, replace(load, one_machine=True), remote=True)
    written = each * (400 + 100)  # what is known is not written again
    assert [together.put, together.got, together.fetched] == pytest.approx([written, each * 600, 0])
    assert [apart.put, apart.got, apart.fetched] == pytest.approx([written, each * 1000, each * 600])
    assert [near.put, near.got, near.fetched] == pytest.approx([written, 0, 0])


def test_a_decode_worker_reads_no_faster_than_its_link() -> None:
    load = Load(10, 8000, 10, 60, 1, shared=0.99)
    found = designed(Costs(LLAMA, named("h200"), "int8"), load, apart=False)
    links = found.traffic.got / (LINK_RATE * BUSY)
    assert found.workers.decode == math.ceil(links) > found.traffic.fleets > 1
    assert any("each at most 500 MB/s" in line for line in by_name(found)["one NATS server"].why)


def test_a_fleet_has_a_worker_of_each_role() -> None:
    load = Load(30, 1500, 250, 2, 0.1, shared=0.5, drafting=Drafting(0.7))
    found = designed(Costs(LLAMA, named("h100"), "int8"), load, apart=True)
    assert found.traffic.fleets == found.workers.prefill == found.workers.decode == found.workers.drafter == 14


def test_a_core_of_a_cpu_fetches_sooner_than_it_computes() -> None:
    found = plan(SMOL, CORE, Load(0.3, 1000, 64, 4.0, 0.15, shared=0.8))
    assert found.load.computed == pytest.approx(200)
    assert by_name(found)["prefix cache"].on
    assert found.costs.codec == "none", "on a CPU a codec saves memory, not time"
    assert found.traffic.fleets == 1


def test_no_more_prefill_workers_than_the_queue_needs() -> None:
    found = plan(SMOL, CORE, Load(2.0, 1000, 64, 4.6, 0.15), "none")
    service = 1000 / found.prefill_rate
    fixed = found.ttft_s - waiting_s(2.0, service, found.workers.prefill)
    assert found.workers.prefill > math.ceil(2.0 * service / 0.8), "the queue asks for more than the work does"
    assert found.ttft_s <= 4.6 < fixed + waiting_s(2.0, service, found.workers.prefill - 1)


def test_what_cannot_be_had_is_said() -> None:
    large = replace(LLAMA, params=70e9, active=70e9)
    assert "does not fit" in plan(large, named("h100"), CHAT).problems[0]
    assert "no step is fast enough" in plan(LLAMA, named("l4"), replace(CHAT, drafting=Drafting())).problems[0]
    assert "first token" in plan(LLAMA, named("h100"), replace(CHAT, ttft_s=0.02)).problems[0]
    many = plan(LLAMA, named("h100"), Load(1e5, 20_000, 200, 1, 0.1))
    assert many.problems == ("more than 100,000 workers of a role would be needed",)
    queued = designed(Costs(LLAMA, named("l4"), "int8"), Load(8000, 20_000, 1, 1000, 1), apart=False)
    assert queued.problems == many.problems, "they keep up with answers, and not with prompts beside these"
    assert many.workers.machines <= 2 * MOST_WORKERS and json.dumps(as_dict(many), allow_nan=False)
    assert "inf" not in told(many)
    for wrong in (replace(CHAT, prompt=0), replace(CHAT, shared=1.5), replace(CHAT, requests_per_s=math.nan)):
        with pytest.raises(InvalidField):
            plan(LLAMA, named("h100"), wrong)
    with pytest.raises(InvalidField):
        plan(LLAMA, named("h100"), CHAT, "int2")
    with pytest.raises(InvalidField):
        named("abacus")


def test_a_codec_that_would_save_is_named() -> None:
    load = Load(5, 1500, 250, 0.5, 0.04, shared=0.5)
    chosen = by_name(plan(LLAMA, named("h100"), load, "none"))["KV codec none"]
    assert not chosen.on and "int4 would do better" in chosen.why[-1]
    auto = by_name(plan(LLAMA, named("h100"), load))["KV codec int8"]
    assert auto.on and "int8 instead of none" in auto.why[-2] and "int4 would do better" in auto.why[-1]
    little = Load(0.5, 100, 100, 2, 0.15)
    assert "would save no worker" in by_name(plan(SMOL, CORE, little))["KV codec none"].why[-1]
    asked = by_name(plan(SMOL, CORE, little, "int8"))["KV codec int8"]
    assert not asked.on and "saves no worker" in asked.why[-1]


def test_drafters_have_time_to_spare_and_draft_for_all_sequences() -> None:
    costs = Costs(LLAMA, named("h100"), "int8")
    drafting = Drafting(0.6, 0.1)
    one, many = (costs.drafts_s(n, 4, 1600, drafting) for n in (1, 100))
    assert one == pytest.approx(0.4 * costs.step_s(1, 1, 1600))
    assert many == pytest.approx(0.4 * costs.step_s(100, 1, 1600)) and many > one
    assert costs.paced(100, 4, 1600, drafting).step_s == pytest.approx(costs.step_s(100, 5, 1600) + many + 0.0005)
    cheap = Drafting(0.7, 0.2)
    found = designed(Costs(SMOL, CORE, "none"), Load(10, 100, 100, 5, 0.1, drafting=cheap), apart=False)
    drafts_s = found.costs.drafts_s(found.usual.sequences, found.usual.depth, 150, cheap)
    work = found.workers.decode * drafts_s / found.usual.step_s
    assert math.ceil(work) < math.ceil(work / BUSY) == found.workers.drafter


def test_drafts_that_hardly_pay_are_not_planned() -> None:
    load = Load(1, 100, 100, 5, 1, drafting=Drafting(0.3, 0.05))
    found = plan(SMOL, CORE, load)
    assert found.trial is not None and 0.9 < found.trial.gain < WORTH
    assert (found.workers.drafter, found.usual.depth, found.full.depth) == (0, 0, 0)
    assert not by_name(found)["speculation"].on and settings_of(found)["TRINE_DRAFT_DEPTH"] == "0"
    bare = plan(SMOL, CORE, replace(load, drafting=Drafting()))
    assert (found.workers, found.ttft_s, found.usual) == (bare.workers, bare.ttft_s, bare.usual)


@given(st.floats(0.05, 0.95), st.integers(1, 8))
def test_expected_tokens_of_a_step(acceptance: float, depth: int) -> None:
    closed = (1 - acceptance ** (depth + 1)) / (1 - acceptance)
    assert Drafting(acceptance).tokens(depth) == pytest.approx(closed)
