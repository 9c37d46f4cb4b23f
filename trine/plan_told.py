"""A plan for a terminal, and as JSON: numbers, settings and advice. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from trine.plan import by_roles
from trine.plan_advice import advice
from trine.plan_decode import BUSY
from trine.plan_design import Plan

KEPT_S = 600.0
"""Shared prefixes should be found so long after they were last written."""
MiB = 1 << 20


def settings(found: Plan) -> dict[str, str]:
    """TRINE_* variables for it."""
    whole = found.load.prompt + found.load.output
    pool = min(max(found.costs.room(), 0.0), 2.0 * found.full.sequences * whole * found.costs.kv_bytes)
    cache = max(1024 * MiB, KEPT_S * found.traffic.put if found.cache_gain_s > 0 else 0.0)
    return {
        "TRINE_KV_CODEC": found.costs.codec,
        "TRINE_MAX_RUNNING": str(found.full.sequences),
        "TRINE_STEP_TOKENS": str(found.step_tokens),
        "TRINE_KV_MEMORY_MB": str(max(1, round(pool / MiB))),
        "TRINE_CHUNK_TOKENS": str(found.costs.chunk_tokens()),
        "TRINE_DRAFT_DEPTH": str(max(found.usual.depth, found.full.depth)),
        "TRINE_CACHE_BYTES": str(round(min(cache, 64 * 1024 * MiB))),
    }


def as_dict(found: Plan) -> dict[str, Any]:
    """For JSON."""
    return {
        **_design(found),
        "designs": [_design(one) for one in by_roles(found.costs, found.load)],
        "sequences": {"usual": found.usual.sequences, "most": found.full.sequences},
        "draft_depth": found.usual.depth,
        "draft_gain": found.trial.gain if found.trial else None,
        "kv_codec": found.costs.codec,
        "kv_bytes_per_token": found.costs.kv_bytes,
        "prefill_tokens_per_s": found.prefill_rate,
        "decode_tokens_per_s": found.full.rate,
        "computed_prompt_tokens": found.load.computed,
        "settings": settings(found),
        "advice": [asdict(one) for one in advice(found)],
        "model": asdict(found.costs.model),
        "hardware": asdict(found.costs.hardware),
        "load": asdict(found.load),
    }


def _design(found: Plan) -> dict[str, Any]:
    return {
        "workers": asdict(found.workers),
        "ttft_ms": found.ttft_s * 1e3 if math.isfinite(found.ttft_s) else None,
        "tpot_ms": found.usual.tpot_s * 1e3,
        "nats": {
            "written_bytes_per_s": found.traffic.put,
            "read_bytes_per_s": found.traffic.got + found.traffic.fetched,
            "messages_per_s": found.traffic.messages,
            "share_of_one_server": found.traffic.share,
            "servers": found.traffic.fleets,
        },
        "problems": list(found.problems),
    }


def told(found: Plan) -> str:
    """For a terminal."""
    load, model, hardware = found.load, found.costs.model, found.costs.hardware
    dims = f"{model.k_dim}" if model.k_dim == model.v_dim else f"{model.k_dim} (keys) and {model.v_dim} (values)"
    mixed = f", {model.active / 1e9:.3g}B for a token" if model.active < model.params else ""
    first = f"after {found.ttft_s * 1e3:,.0f} ms" if math.isfinite(found.ttft_s) else "later and later"
    prompts, answers = f"{found.prefill_rate:,.0f} tokens/s of prompts", f"{found.full.rate:,.0f} tokens/s"
    rates = f"a decode worker computes {prompts} and gives up to {answers}, in {found.full.share:.0%} of its time,"
    if found.workers.prefill:
        rates = f"a prefill worker computes {prompts}; a decode worker gives up to {answers}"
    lines = [
        f"{model.name}: {model.params / 1e9:.3g}B weights of {model.dtype_bytes} bytes{mixed}, {model.layers} layers, "
        f"{model.kv_heads} KV heads of {dims}",
        f"{hardware.name}: {hardware.memory / 1e9:.0f} GB, {hardware.bandwidth / 1e9:,.0f} GB/s, "
        f"{hardware.flops / 1e12:.3g} TFLOPS ({hardware.source}); planned with {hardware.reads:.0%} and "
        f"{hardware.computes:.0%} of these, and {hardware.floor_s * 1e3:g} ms a step beside",
        f"{load.requests_per_s:g} requests/s of {load.prompt:,.0f} + {load.output:,.0f} tokens",
        "",
        f"workers: {found.workers.prefill} prefill, {found.workers.decode} decode, {found.workers.drafter} drafter "
        f"(each at most {BUSY:.0%} busy)",
        f"  {rates} with {found.full.sequences} sequences",
        f"  first token {first}, then one every {found.usual.tpot_s * 1e3:.1f} ms "
        f"({found.usual.sequences} sequences at once in a decode worker)",
    ]
    lines += [f"  NOT POSSIBLE: {problem}" for problem in found.problems]
    for one in advice(found):
        lines += ["", f"{one.technique}: {'yes' if one.on else 'no'}", *(f"  {line}" for line in one.why)]
    return "\n".join([*lines, "", "settings", *(f"  {key}={value}" for key, value in settings(found).items())])
