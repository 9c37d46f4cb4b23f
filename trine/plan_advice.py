"""A plan in plain words: which technique to turn on, and the arithmetic that says so. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from trine.plan import BUSY, LOCAL_TOKENS, Plan, by_codec, caching_pays, fetch_s
from trine.plan_bus import LINK_RATE, MEMORY_RATE, MESSAGE_RATE, PLANNED, QUEUE_RATE, SERVER_RATE

STEP_TOKENS = 256
"""`TRINE_STEP_TOKENS`, unless set: a decode step computes so much of a prompt."""
KEPT_S = 600.0
"""Shared prefixes should be found so long after they were last written."""
MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class Advice:
    """`on`: whether it pays; `why`: sentences with the numbers in them."""

    technique: str
    on: bool
    why: tuple[str, ...]


def advice(found: Plan) -> tuple[Advice, ...]:
    return (
        _prefix_cache(found),
        _codec(found),
        _paging(found),
        _speculation(found),
        _prefill_workers(found),
        _nats(found),
    )


def _prefix_cache(found: Plan) -> Advice:
    load, costs = found.load, found.costs
    fetch, compute = fetch_s(costs, load) * 1e6, 1e6 / found.prefill_rate
    way = "the machine's memory" if load.one_machine else "NATS"
    rate = MEMORY_RATE if load.one_machine else LINK_RATE
    per_token = (
        f"A token's KV ({costs.kv_bytes:,.0f} bytes) takes {compute:.0f} µs to compute (1 s / "
        f"{found.prefill_rate:,.0f} tokens) and {fetch:.0f} µs to fetch through {way} "
        f"({costs.kv_bytes:,.0f} B / {rate / 1e6:,.0f} MB/s)."
    )
    if not load.shared:
        return Advice("prefix cache", False, ("No prompt tokens are shared, so nothing can be found again.", per_token))
    if not caching_pays(costs, load):
        pool = (
            "Hits in a worker's own pool cost nothing, so leave it on for those (TRINE_AFFINITY); plan none from NATS."
        )
        return Advice("prefix cache", False, (per_token, "Fetching is slower than computing.", pool))
    saved = load.prompt * load.shared
    gain = saved * (compute - fetch) / 1e3
    return Advice(
        "prefix cache",
        True,
        (
            per_token,
            f"{load.shared:.0%} of {load.prompt:,.0f} prompt tokens are {saved:,.0f}, so the first token comes "
            f"{gain:,.0f} ms sooner and {load.requests_per_s * saved:,.0f} tokens per second need not be computed.",
        ),
    )


def _codec(found: Plan) -> Advice:
    plans = by_codec(found)
    lines = []
    for other in plans:
        whole = other.load.prompt + other.load.output
        lines.append(
            f"{other.costs.codec}: {other.costs.kv_bytes:,.0f} bytes a token; {other.costs.fitting(whole):,} sequences "
            f"fit; {other.workers.prefill} prefill and {other.workers.decode} decode workers; "
            f"{(other.traffic.put + other.traffic.got) / 1e6:,.0f} MB/s through NATS."
        )
    name = found.costs.codec
    plain = plans[0]
    if name == "none":
        lines.append("A codec would save no worker and no server here: leave KV as it is.")
    else:
        lines.append(
            f"Against none it saves {plain.workers.machines - found.workers.machines} of "
            f"{plain.workers.machines} workers and {plain.traffic.fleets - found.traffic.fleets} of "
            f"{plain.traffic.fleets} NATS servers. Measure first what it costs the model: trine check."
        )
    return Advice(f"KV codec {name}", name != "none", tuple(lines))


def _paging(found: Plan) -> Advice:
    whole = found.load.prompt + found.load.output
    longest = 4 * whole
    each = whole * found.costs.kv_bytes
    return Advice(
        "paging",
        True,
        (
            f"It is always on. {max(found.costs.room(), 0) / 1e9:.1f} GB are left for KV and a sequence takes "
            f"{each / 1e9:.3f} GB, so {found.costs.fitting(whole):,} fit; with memory reserved for texts four times as "
            f"long as the mean, {found.costs.fitting(longest):,} would.",
            f"A block has 16 tokens, so a sequence wastes 8 of {whole:,.0f} on average ({8 / whole:.1%}).",
        ),
    )


def _speculation(found: Plan) -> Advice:
    drafting, best, plain = found.load.drafting, found.usual, found.undrafted
    if not drafting.acceptance:
        why = "No acceptance was given: `trine check --drafter` tells it, or a running fleet's metrics do."
        return Advice("speculation", False, (why,))
    usual = (
        f"This load brings a decode worker {plain.sequences} sequences at once, with {plain.step_s * 1e3:.1f} ms "
        "a step."
    )
    if not best.depth:
        return Advice(
            "speculation",
            False,
            (usual, f"At {drafting.acceptance:.0%} acceptance no number of drafts makes up for checking them."),
        )
    gain = plain.tpot_s / best.tpot_s
    terms = " + ".join(["1", *(f"{drafting.acceptance:g}^{i}" for i in range(1, min(best.depth, 3) + 1))])
    return Advice(
        "speculation",
        gain >= 1.05,
        (
            usual,
            f"With {best.depth} drafts a step brings {terms}{' + …' if best.depth > 3 else ''} = {best.tokens:.2f} "
            f"tokens and takes {best.step_s * 1e3:.1f} ms: a token in {best.tpot_s * 1e3:.1f} ms instead of "
            f"{plain.tpot_s * 1e3:.1f}, {gain:.2f} times as fast.",
            *(["That hardly pays for a drafter."] if gain < 1.05 else []),
            f"With {found.full.sequences} sequences at once the best depth is {found.full.depth}: the fuller a step, "
            "the more each draft costs.",
        ),
    )


def _prefill_workers(found: Plan) -> Advice:
    load, costs = found.load, found.costs
    chunk = STEP_TOKENS / found.prefill_rate
    gap = found.usual.step_s + chunk
    lines = [
        f"A decode worker that computes prompts itself adds up to {STEP_TOKENS} of their tokens to a step: "
        f"{STEP_TOKENS} / {found.prefill_rate:,.0f} = {chunk * 1e3:.0f} ms, so running answers pause for "
        f"{gap * 1e3:.0f} ms while prompts come in.",
        f"{found.together} decode workers would do without prefill workers, against {found.workers.prefill} + "
        f"{found.workers.decode}.",
    ]
    if not found.workers.prefill:
        lines.append(f"Only {found.computed:.0f} tokens of a prompt are computed, at most {LOCAL_TOKENS}.")
        return Advice("prefill workers", False, tuple(lines))
    slow = fetch_s(costs, load) > 1 / found.prefill_rate
    if slow:
        lines.append("The way from another worker takes longer than computing: keep both roles on one machine.")
    worth = gap > load.tpot_s and not slow
    if gap <= load.tpot_s:
        lines.append(f"That is within the {load.tpot_s * 1e3:g} ms that a token may take: start without.")
    return Advice("prefill workers", worth, tuple(lines))


def _nats(found: Plan) -> Advice:
    flow, load = found.traffic, found.load
    enough = PLANNED / flow.share * load.requests_per_s if flow.share else math.inf
    lines = [
        f"Blocks written {flow.put / 1e6:,.0f} MB/s, read {flow.got / 1e6:,.0f} MB/s: "
        f"{flow.bytes_share:.0%} of the {SERVER_RATE / 1e6:,.0f} MB/s of one server.",
        f"{flow.messages:,.0f} messages per second of {MESSAGE_RATE:,.0f} ({flow.messages / MESSAGE_RATE:.0%}); "
        f"{flow.requests:,.1f} requests per second of {QUEUE_RATE:,.0f} ({flow.requests / QUEUE_RATE:.0%}).",
        f"One server is enough up to {enough:,.1f} requests per second (at {PLANNED:.0%} of its limit).",
    ]
    if flow.fleets > 1:
        lines.append(
            f"This load needs {flow.fleets} fleets with a server each, or fewer bytes: a codec, all workers of a fleet "
            "on one machine, or no prefill workers. A cluster does not help: a model's blocks are one stream, on one "
            "server."
        )
    return Advice("one NATS server", flow.fleets == 1, tuple(lines))


def settings(found: Plan) -> dict[str, str]:
    """TRINE_* variables for it, where they differ from what is set without."""
    whole = found.load.prompt + found.load.output
    pool = min(max(found.costs.room(), 0.0), 2.0 * found.full.sequences * whole * found.costs.kv_bytes)
    cache = max(1024 * MiB, KEPT_S * found.traffic.put if found.load.shared else 0.0)
    return {
        "TRINE_KV_CODEC": found.costs.codec,
        "TRINE_MAX_RUNNING": str(found.full.sequences),
        "TRINE_KV_MEMORY_MB": str(max(1, round(pool / MiB))),
        "TRINE_CHUNK_TOKENS": str(found.costs.chunk_tokens()),
        "TRINE_DRAFT_DEPTH": str(max(found.usual.depth, found.full.depth)),
        "TRINE_CACHE_BYTES": str(round(min(cache, 64 * 1024 * MiB))),
    }


def as_dict(found: Plan) -> dict[str, Any]:
    """For JSON."""
    return {
        "workers": asdict(found.workers),
        "together": found.together,
        "ttft_ms": _finite(found.ttft_s * 1e3),
        "tpot_ms": found.usual.tpot_s * 1e3,
        "sequences": {"usual": found.usual.sequences, "most": found.full.sequences},
        "draft_depth": found.usual.depth,
        "kv_codec": found.costs.codec,
        "kv_bytes_per_token": found.costs.kv_bytes,
        "prefill_tokens_per_s": found.prefill_rate,
        "decode_tokens_per_s": found.full.rate,
        "computed_prompt_tokens": found.computed,
        "nats": {
            "written_bytes_per_s": found.traffic.put,
            "read_bytes_per_s": found.traffic.got,
            "messages_per_s": found.traffic.messages,
            "share_of_one_server": found.traffic.share,
            "servers": found.traffic.fleets,
        },
        "settings": settings(found),
        "advice": [asdict(one) for one in advice(found)],
        "problems": list(found.problems),
        "model": asdict(found.costs.model),
        "hardware": asdict(found.costs.hardware),
        "load": asdict(found.load),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def told(found: Plan) -> str:
    """For a terminal."""
    load, model, hardware = found.load, found.costs.model, found.costs.hardware
    lines = [
        f"{model.name}: {model.params / 1e9:.3g}B weights of {model.dtype_bytes} bytes, {model.layers} layers, "
        f"{model.kv_heads} KV heads of {model.head_dim}",
        f"{hardware.name}: {hardware.memory / 1e9:.0f} GB, {hardware.bandwidth / 1e9:,.0f} GB/s, "
        f"{hardware.flops / 1e12:.3g} TFLOPS ({hardware.source}); planned with {hardware.reads:.0%} and "
        f"{hardware.computes:.0%} of these, and {hardware.floor_s * 1e3:g} ms a step beside",
        f"{load.requests_per_s:g} requests/s of {load.prompt:,.0f} + {load.output:,.0f} tokens",
        "",
        f"workers: {found.workers.prefill} prefill, {found.workers.decode} decode, {found.workers.drafter} drafter "
        f"(each at most {BUSY:.0%} busy); or {found.together} decode and no prefill, see below",
        f"  a prefill worker computes {found.prefill_rate:,.0f} tokens/s; a decode worker gives up to "
        f"{found.full.rate:,.0f} tokens/s with {found.full.sequences} sequences",
        f"  first token after {found.ttft_s * 1e3:,.0f} ms, then one every {found.usual.tpot_s * 1e3:.1f} ms "
        f"({found.usual.sequences} sequences at once in a decode worker)",
    ]
    lines += [f"  NOT POSSIBLE: {problem}" for problem in found.problems]
    for one in advice(found):
        lines += ["", f"{one.technique}: {'yes' if one.on else 'no'}", *(f"  {line}" for line in one.why)]
    return "\n".join([*lines, "", "settings", *(f"  {key}={value}" for key, value in settings(found).items())])
