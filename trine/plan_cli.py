"""`trine plan`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from shared.config import DEFAULT_MODEL
from shared.errors import InvalidField
from trine import plan_hardware
from trine.console import reported
from trine.plan import plan as planned
from trine.plan_advice import as_dict, told
from trine.plan_cost import Drafting
from trine.plan_hardware import Hardware
from trine.plan_load import Load
from trine.plan_metrics import NOTHING, Observed, watch
from trine.plan_model import ModelShape, shape_of


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
    acceptance: Annotated[float | None, typer.Option(help="Share of drafts that are right (unknown).")] = None,
    draft_cost: Annotated[float, typer.Option(help="A draft's time, in steps of the model.")] = 0.05,
    kv_codec: Annotated[str, typer.Option(help="auto, none, int8, fp8_e4m3 or int4.")] = "auto",
    one_machine: Annotated[bool, typer.Option("--one-machine", help="All workers are on one machine.")] = False,
    metrics: Annotated[str, typer.Option(help="Take what is not given from a gateway: http://HOST:PORT/metrics.")] = "",
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Watch it for so long.")] = 10.0,
    model_name: Annotated[str | None, typer.Option(help="Of the gateway's models, this one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
) -> None:
    """How many workers a load needs, what to turn on, and when NATS is not enough: with the arithmetic."""
    seen = watch(metrics, seconds, model_name) if metrics else NOTHING
    machine = _hardware(hardware, memory_gb, bandwidth, tflops)
    width = dtype_bytes or (4 if machine.codec_reads else 2)
    if params is not None:
        numbers = {"layers": layers, "heads": heads, "kv-heads": kv_heads, "head-dim": head_dim, "dtype-bytes": width}
        for name, value in numbers.items():
            if not 0 < value <= 1 << 20:
                raise InvalidField(f"--{name}: {value} is not positive", field=name)
        if not 0 < (active or params) <= params:
            raise InvalidField("--params, --active: above 0, and active no more than all", field="active")
        given = (params * 1e9, (active or params) * 1e9)
        shape = ModelShape(f"{params:g}B as given", layers, heads, kv_heads, head_dim, *given, width)
    else:
        shape = _resized(shape_of(_path(model)), dtype_bytes, machine)
    found = planned(
        shape,
        machine,
        Load(
            requests_per_s=_first(load, seen.requests_per_s, 1.0),
            prompt=_first(prompt, seen.prompt, 1000.0),
            output=_first(output, seen.output, 200.0),
            ttft_s=ttft_ms / 1e3,
            tpot_s=tpot_ms / 1e3,
            shared=_first(shared_prefix, seen.cached, 0.0),
            drafting=Drafting(min(_first(acceptance, seen.acceptance, 0.0), 0.99), draft_cost),
            one_machine=one_machine,
        ),
        kv_codec,
    )
    if as_json:
        print(json.dumps({**as_dict(found), "observed": asdict(seen) if metrics else None}))
        return
    typer.echo("\n".join([*(_seen(seen) if metrics else []), told(found)]))


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


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


def _resized(shape: ModelShape, dtype_bytes: int | None, machine: Hardware) -> ModelShape:
    """Weights are held in fp32 on a CPU and in 2 bytes on a GPU, whatever the files have."""
    return replace(shape, dtype_bytes=dtype_bytes or (4 if machine.codec_reads else min(shape.dtype_bytes, 2)))


def _seen(seen: Observed) -> list[str]:
    def shown(value: float | None, unit: str, scale: float = 1.0) -> str:
        return f"{value * scale:,.4g}{unit}" if value is not None else "unknown"

    there = ", ".join(f"{count} {role}" for role, count in seen.workers.items())
    return [
        f"the fleet now: {there}; {shown(seen.requests_per_s, ' requests/s')} of {shown(seen.prompt, '')} + "
        f"{shown(seen.output, '')} tokens; {shown(seen.cached, ' %', 100)} of prompts cached; "
        f"{shown(seen.acceptance, ' %', 100)} of drafts accepted; first token {shown(seen.ttft_s, ' ms', 1e3)}, "
        f"then {shown(seen.tpot_s, ' ms', 1e3)}",
        "",
    ]
