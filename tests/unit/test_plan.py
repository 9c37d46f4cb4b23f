"""`trine plan`: its arithmetic, what it advises, and that more to do never needs fewer workers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from shared.errors import InvalidField, ModelError
from trine.cli import app
from trine.plan import plan, waiting_s
from trine.plan_advice import advice, as_dict, told
from trine.plan_cost import Costs, Drafting
from trine.plan_hardware import HARDWARE, named
from trine.plan_hardware import given as machine
from trine.plan_load import Load
from trine.plan_metrics import observed, parse
from trine.plan_model import CODECS, ModelShape, shape_of

LLAMA = ModelShape("llama-8b", 32, 32, 8, 128, 8.03e9, 8.03e9, 2)
SMOL = ModelShape("smollm2-135m", 30, 9, 3, 64, 134_515_008, 134_515_008, 4)
CORE = machine(24, 13, 0.075, cpu=True)
CHAT = Load(5, 1500, 250, 0.5, 0.04, shared=0.5, drafting=Drafting(0.7), one_machine=True)


def kv_bytes_of_the_engine(shape: ModelShape, codec: str) -> float:
    import torch

    from shared.engine.codecs.base import LayerShape
    from shared.engine.codecs.registry import codec_of
    from shared.engine.pool import BlockLayout

    layers = [LayerShape(shape.kv_heads, shape.head_dim, shape.head_dim)] * shape.layers
    dtype = {2: torch.bfloat16, 4: torch.float32}[shape.dtype_bytes]
    return BlockLayout.of(layers, 16, dtype, codec_of(codec)).block_bytes / 16


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [LLAMA, SMOL, ModelShape("odd", 2, 3, 1, 70, 1e6, 1e6, 2)], ids=lambda s: s.name)
def test_kv_bytes_are_those_of_the_pool(shape: ModelShape, codec: str) -> None:
    assert shape.kv_bytes(codec) == kv_bytes_of_the_engine(shape, codec)


def test_a_chat_on_an_h100() -> None:
    found = plan(LLAMA, named("h100"), CHAT)
    assert (found.workers.prefill, found.workers.decode, found.workers.drafter) == (1, 1, 1)
    assert found.costs.codec == "int8", "its blocks would need a second server"
    # 2 × 8.03e9 operations a token and attention, at half of 989 TFLOPS.
    assert 20_000 < found.prefill_rate < 0.5 * 989e12 / (2 * 8.03e9)
    # Weights alone: 16.06 GB at 70 % of 3.35 TB/s are 6.8 ms.
    assert found.undrafted.step_s > 16.06e9 / (0.7 * 3.35e12)
    assert {one.technique: one.on for one in advice(found)} == {
        "prefix cache": True,
        "KV codec int8": True,
        "paging": True,
        "speculation": True,
        "prefill workers": False,
        "one NATS server": True,
    }
    assert "NATS" in told(found) and json.dumps(as_dict(found), allow_nan=False)


def test_over_nats_a_fast_gpu_computes_sooner_than_it_fetches() -> None:
    found = plan(LLAMA, named("h100"), replace(CHAT, one_machine=False))
    by_name = {one.technique: one for one in advice(found)}
    assert found.computed == 1500 and not by_name["prefix cache"].on
    assert found.costs.codec == "int8" and found.traffic.fleets == 3
    assert not by_name["one NATS server"].on and "one stream" in by_name["one NATS server"].why[-1]


def test_a_core_of_a_cpu_fetches_sooner_than_it_computes() -> None:
    found = plan(SMOL, CORE, Load(0.3, 1000, 64, 4.0, 0.15, shared=0.8))
    assert found.computed == pytest.approx(200)
    assert {one.technique: one.on for one in advice(found)}["prefix cache"]
    assert found.costs.codec == "none", "on a CPU a codec saves memory, not time"
    assert found.traffic.fleets == 1


def test_no_more_prefill_workers_than_the_queue_needs() -> None:
    found = plan(SMOL, CORE, Load(2.0, 1000, 64, 4.6, 0.15), "none")
    service = 1000 / found.prefill_rate
    fixed = found.ttft_s - waiting_s(2.0, service, found.workers.prefill)
    assert found.workers.prefill == math.ceil(2.0 * service / 0.8) + 1, "the queue asks for more than the work does"
    assert found.ttft_s <= 4.6 < fixed + waiting_s(2.0, service, found.workers.prefill - 1)


def test_what_cannot_be_had_is_said() -> None:
    large = replace(LLAMA, params=70e9, active=70e9)
    assert "does not fit" in plan(large, named("h100"), CHAT).problems[0]
    assert "no step is fast enough" in plan(LLAMA, named("l4"), replace(CHAT, drafting=Drafting())).problems[0]
    assert "first token" in plan(LLAMA, named("h100"), replace(CHAT, ttft_s=0.02)).problems[0]
    for wrong in (replace(CHAT, prompt=0), replace(CHAT, shared=1.5), replace(CHAT, requests_per_s=math.nan)):
        with pytest.raises(InvalidField):
            plan(LLAMA, named("h100"), wrong)
    with pytest.raises(InvalidField):
        plan(LLAMA, named("h100"), CHAT, "int2")
    with pytest.raises(InvalidField):
        named("abacus")


LOADS = st.builds(
    Load,
    requests_per_s=st.floats(0.01, 500),
    prompt=st.floats(1, 20_000),
    output=st.floats(1, 4_000),
    ttft_s=st.floats(0.05, 20),
    tpot_s=st.floats(0.005, 1),
    shared=st.floats(0, 1),
    drafting=st.builds(Drafting, acceptance=st.sampled_from([0.0, 0.3, 0.8]), cost=st.floats(0.01, 0.5)),
    one_machine=st.booleans(),
)
HARDER = st.sampled_from(["requests_per_s", "prompt", "output", "ttft_s", "tpot_s", "shared"])


@settings(max_examples=50, deadline=None)
@given(LOADS, HARDER, st.floats(1.01, 5), st.sampled_from(["l4", "h200"]), st.sampled_from(["none", "int4", "auto"]))
def test_more_to_do_never_needs_fewer_workers(load: Load, what: str, by: float, card: str, codec: str) -> None:
    up = what in ("requests_per_s", "prompt", "output")
    value = getattr(load, what) * by if up else getattr(load, what) / by
    easy, hard = (plan(LLAMA, named(card), one, codec) for one in (load, replace(load, **{what: value})))
    if easy.problems or hard.problems:
        return
    if codec == "auto":  # roles may be traded for each other when the codec changes
        assert hard.workers.machines >= easy.workers.machines
    else:
        assert hard.workers.prefill >= easy.workers.prefill
        assert hard.workers.decode >= easy.workers.decode
    if what != "shared":
        assert hard.traffic.share >= easy.traffic.share or what in ("ttft_s", "tpot_s") or codec == "auto"


@settings(max_examples=40, deadline=None)
@given(st.floats(0.1, 200), st.floats(0.001, 2), st.integers(1, 400))
def test_more_workers_never_wait_longer(per_s: float, service: float, workers: int) -> None:
    assert waiting_s(per_s, service, workers + 1) <= waiting_s(per_s, service, workers)


@given(st.floats(0.05, 0.95), st.integers(1, 8))
def test_expected_tokens_of_a_step(acceptance: float, depth: int) -> None:
    closed = (1 - acceptance ** (depth + 1)) / (1 - acceptance)
    assert Drafting(acceptance).tokens(depth) == pytest.approx(closed)


def test_a_smaller_codec_fits_no_fewer() -> None:
    for card in HARDWARE.values():
        fitting = [Costs(LLAMA, card, codec).fitting(2000) for codec in CODECS]
        assert fitting == sorted(fitting)


PAGE = """# HELP trine_requests_total HTTP requests for answers
trine_requests_total{{model="m",outcome="ok"}} {ok}
trine_requests_total{{model="m",outcome="overloaded"}} 5.0
trine_requests_total{{model="other \\"}}",outcome="ok"}} 1.0
trine_request_duration_seconds_count{{model="m"}} {ok}
trine_prompt_tokens_total{{model="m"}} {prompt}
trine_cached_prompt_tokens_total{{model="m"}} {cached}
trine_generation_tokens_total{{model="m"}} {output}
trine_drafted_tokens_total{{model="m"}} {output}
trine_accepted_tokens_total{{model="m"}} {accepted}
trine_time_to_first_token_seconds_sum{{model="m"}} 4.0
trine_time_to_first_token_seconds_count{{model="m"}} 8.0
trine_worker_up{{model="m",role="decode",worker="d1"}} 1.0
trine_worker_up{{model="m",role="decode",worker="d2"}} 1.0
trine_worker_up{{model="m",role="prefill",worker="p1"}} 0.0
no metric at all
"""


def test_a_fleets_metrics() -> None:
    first = parse(PAGE.format(ok=8, prompt=8000, cached=0, output=800, accepted=80))
    second = parse(PAGE.format(ok=28, prompt=38000, cached=15000, output=4800, accepted=1080))
    seen = observed(first, second, 10.0)
    assert (seen.requests_per_s, seen.prompt, seen.output, seen.cached, seen.acceptance) == (2, 1500, 200, 0.5, 0.25)
    assert seen.workers == {"prefill": 0, "decode": 2, "drafter": 0}
    still = observed(second, second, 10.0, "m")  # nothing ended: means of the whole life, and no rate
    assert (still.requests_per_s, still.ttft_s, still.tpot_s) == (None, 0.5, None)
    assert still.prompt == pytest.approx(38000 / 28)


def test_what_is_read_of_metrics_is_what_the_gateway_tells() -> None:
    root = Path(__file__).resolve().parents[2]
    told_ = "".join(path.read_text("utf-8") for path in (root / "services" / "gateway").glob("*metrics.py"))
    read = set(re.findall(r'"(trine_[a-z_]+[a-z])"', (root / "trine" / "plan_metrics.py").read_text("utf-8")))
    assert len(read) > 8
    for name in read:
        assert f'"{re.sub("_(total|count|sum)$", "", name)}"' in told_, name


def test_the_shape_of_a_folder(tmp_path) -> None:
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 100,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(tmp_path)
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype_bytes) == (2, 2, 16, 2)
    assert shape.params == 2 * (64 * 16 * 12 + 3 * 64 * 128) + 6400
    mixed = {**config, "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(mixed))
    assert shape_of(tmp_path).active == shape_of(tmp_path).params - 6 * 3 * 64 * 128 * 2
    for bad in ("{", "[]", "{}", '{"num_attention_heads": "x"}'):
        (tmp_path / "config.json").write_text(bad)
        with pytest.raises(ModelError):
            shape_of(tmp_path)


def test_the_command() -> None:
    run = CliRunner()
    given_ = ["plan", "--params", "8", "--hardware", "h100", "--load", "3", "--acceptance", "0.6"]
    result = run.invoke(app, [*given_, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["workers"]["decode"] == 1
    assert "one NATS server" in run.invoke(app, given_).stdout
    assert run.invoke(app, [*given_, "--metrics", "file:///etc/passwd"]).exit_code == 1
    assert "no folder or GGUF file '/no/such'" in run.invoke(app, ["plan", "--model", "/no/such"]).stderr
    assert run.invoke(app, ["plan", "--params", "-1", "--hardware", "h100"]).exit_code == 1
    assert run.invoke(app, [*given_, "--memory-gb", "80"]).exit_code == 1
