"""`trine plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from shared.config import DEFAULT_MODEL
from shared.errors import InvalidField
from trine import plan_hardware
from trine.console import reported
from trine.plan import plan as planned
from trine.plan_cost import Drafting
from trine.plan_files import shape_of
from trine.plan_hardware import Hardware
from trine.plan_load import MOST_ACCEPTANCE, Load
from trine.plan_metrics import NOTHING, Observed, watch
from trine.plan_model import ModelShape
from trine.plan_told import as_dict, told

ASSUMED = {"load": 1.0, "prompt": 1000.0, "output": 200.0, "shared-prefix": 0.0, "acceptance": 0.0}
"""What is neither given nor observed."""
MOST_BILLIONS = 1e6


@reported
def plan(
    model: Annotated[str, typer.Option(help="A folder with config.json, or a GGUF file.")] = "",
    params: Annotated[float | None, typer.Option(help="Instead: weights, in billions.")] = None,
    active: Annotated[float | None, typer.Option(help="Of these, for one token (mixture of experts).")] = None,
    layers: Annotated[int, typer.Option(help="With --params.")] = 32,
    heads: Annotated[int, typer.Option(help="With --params.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="With --params.")] = 8,
    head_dim: Annotated[int, typer.Option(help="With --params.")] = 128,
    dtype_bytes: Annotated[int | None, typer.Option(help="Of a weight as it is held: 2 on a GPU, 4 on a CPU.")] = None,
    hardware: Annotated[
        str, typer.Option(help="A GPU's name (H100 …), or cpu: a core of this machine, measured.")
    ] = "cpu",
    memory_gb: Annotated[float | None, typer.Option(help="Instead: a machine's memory …")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="… its memory's GB per second …")] = None,
    tflops: Annotated[float | None, typer.Option(help="… and its dense TFLOPS.")] = None,
    load: Annotated[float | None, typer.Option(help="Requests per second (1).")] = None,
    prompt: Annotated[float | None, typer.Option(help="Tokens of a prompt, on average (1000).")] = None,
    output: Annotated[float | None, typer.Option(help="Tokens of an answer, on average (200).")] = None,
    ttft_ms: Annotated[float, typer.Option(help="The first token is wanted within so long.")] = 1000.0,
    tpot_ms: Annotated[float, typer.Option(help="And each further one.")] = 100.0,
    shared_prefix: Annotated[float | None, typer.Option(help="Share of prompt tokens that came before (0).")] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="Chance that a draft is right if those before it are (unknown).")
    ] = None,
    draft_cost: Annotated[float, typer.Option(help="A draft's time, in steps of the model.")] = 0.05,
    kv_codec: Annotated[str, typer.Option(help="auto, none, int8, fp8_e4m3 or int4.")] = "auto",
    one_machine: Annotated[bool, typer.Option("--one-machine", help="All workers are on one machine.")] = False,
    metrics: Annotated[str, typer.Option(help="Take what is not given from a gateway: http://HOST:PORT/metrics.")] = "",
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Watch it for so long.")] = 10.0,
    model_name: Annotated[str | None, typer.Option(help="Of the gateway's models, this one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
) -> None:
    """How many workers a load needs, what to turn on, and when NATS is not enough: with the arithmetic."""
    machine = _hardware(hardware, memory_gb, bandwidth, tflops)
    width = machine.number_bytes if dtype_bytes is None else _within("dtype-bytes", dtype_bytes, 1, 8)
    numbers = {"layers": layers, "heads": heads, "kv-heads": kv_heads, "head-dim": head_dim}
    shape = shape_of(_path(model)) if params is None else _from_numbers(params, active, numbers)
    # Weights are held in fp32 on a CPU and in 2 bytes on a GPU, whatever the files have.
    shape = replace(shape, dtype_bytes=width, kv_dtype_bytes=machine.number_bytes)
    given = {"load": load, "prompt": prompt, "output": output, "shared-prefix": shared_prefix, "acceptance": acceptance}
    seen = watch(metrics, seconds, model_name) if metrics else NOTHING
    known, assumed = _known(given, seen)
    asked = Load(
        requests_per_s=known["load"],
        prompt=known["prompt"],
        output=known["output"],
        ttft_s=ttft_ms / 1e3,
        tpot_s=tpot_ms / 1e3,
        shared=known["shared-prefix"],
        drafting=Drafting(known["acceptance"], draft_cost),
        one_machine=one_machine,
    )
    found = planned(shape, machine, asked, kv_codec)
    if as_json:
        observed = {"observed": asdict(seen) if metrics else None, "assumed": assumed}
        print(json.dumps({**as_dict(found), **observed}, allow_nan=False))
        return
    typer.echo("\n".join([*(_seen(seen, assumed) if metrics else []), told(found)]))


def _known(given: Mapping[str, float | None], seen: Observed) -> tuple[dict[str, float], dict[str, float]]:
    """What is given, else what was observed, else what is assumed; and of these what is assumed."""
    right = None if seen.acceptance is None else min(seen.acceptance, MOST_ACCEPTANCE)
    observed = {
        "load": seen.requests_per_s,
        "prompt": seen.prompt,
        "output": seen.output,
        "shared-prefix": seen.cached,
        "acceptance": right,
    }
    both = [*observed.items(), *given.items()]
    known = {name: value for name, value in both if value is not None}
    assumed = {name: value for name, value in ASSUMED.items() if name not in known}
    return {**known, **assumed}, assumed


def _from_numbers(params: float, active: float | None, numbers: Mapping[str, int]) -> ModelShape:
    """`params` and `active` in billions; `numbers` by option. Raises InvalidField."""
    layers, heads, kv_heads, head_dim = (_within(name, number, 1, 1 << 20) for name, number in numbers.items())
    weights = _within("params", params, 1e-6, MOST_BILLIONS)
    used = weights if active is None else _within("active", active, 1e-6, weights)
    return ModelShape(f"{params:g}B as given", layers, heads, kv_heads, head_dim, head_dim, weights * 1e9, used * 1e9)


N = TypeVar("N", int, float)


def _within(option: str, value: N, low: float, high: float) -> N:
    """Raises InvalidField."""
    if not low <= value <= high:
        raise InvalidField(f"--{option}: {value:g} is not within {low:g} and {high:g}", field=option)
    return value


def _path(model: str) -> Path:
    if model and model != DEFAULT_MODEL:
        return Path(model).expanduser()
    from shared.engine.weights import BUILT_IN, packaged_gguf

    return packaged_gguf(BUILT_IN[DEFAULT_MODEL])


def _hardware(name: str, memory_gb: float | None, bandwidth: float | None, tflops: float | None) -> Hardware:
    numbers = {"memory-gb": memory_gb, "bandwidth": bandwidth, "tflops": tflops}
    if all(value is None for value in numbers.values()):
        return plan_hardware.measured_cpu() if name.lower() == "cpu" else plan_hardware.named(name)
    for option, value in numbers.items():
        if value is None or not 0 < value < 1e6:
            raise InvalidField(f"--{option}: give memory, bandwidth and TFLOPS together, above 0", field=option)
    return plan_hardware.given(*(float(v) for v in numbers.values() if v is not None), cpu=name.lower() == "cpu")


def _seen(seen: Observed, assumed: Mapping[str, float]) -> list[str]:
    def shown(value: float | None, unit: str, scale: float = 1.0) -> str:
        return f"{value * scale:,.4g}{unit}" if value is not None else "unknown"

    there = ", ".join(f"{count} {role}" for role, count in seen.workers.items())
    lines = [
        f"the fleet now: {there}; {shown(seen.requests_per_s, ' requests/s')} of {shown(seen.prompt, '')} + "
        f"{shown(seen.output, '')} tokens; {shown(seen.cached, ' %', 100)} of prompts cached; "
        f"drafts right with {shown(seen.acceptance, ' %', 100)}; first token {shown(seen.ttft_s, ' ms', 1e3)}, "
        f"then {shown(seen.tpot_s, ' ms', 1e3)}",
    ]
    if seen.requests_per_s is None:
        lines.append("nothing was answered meanwhile: means are of the gateway's whole life")
    if assumed:
        told_ = ", ".join(f"--{name} {value:g}" for name, value in assumed.items())
        lines.append(f"neither given nor seen, so assumed: {told_}")
    return [*lines, ""]
