"""A plan in plain words: which technique to turn on, and the arithmetic that says so. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trine.forecast import WORTH
from trine.plan import by_codec, by_roles
from trine.plan_bus import LINK_RATE, MEMORY_RATE, MESSAGE_RATE, PLANNED, QUEUE_RATE, SERVER_RATE, fetch_s
from trine.plan_decode import BUSY
from trine.plan_design import LOCAL_TOKENS, Plan


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
    speed = costs.prefill_rate((load.cached or load.prompt) / 2)  # what is shared is what a prompt begins with
    fetch, compute = fetch_s(costs, load) * 1e6, 1e6 / speed
    way, rate = ("the machine's memory", MEMORY_RATE) if load.one_machine else ("NATS", LINK_RATE)
    lines = [
        f"A token's KV ({costs.kv_bytes:,.0f} bytes) takes {compute:.0f} µs to compute (1 s / {speed:,.0f} tokens) and "
        f"{fetch:.0f} µs to fetch through {way} ({costs.kv_bytes:,.0f} B / {rate / 1e6:,.0f} MB/s)."
    ]
    if not load.shared:
        return Advice("prefix cache", False, ("No prompt tokens are shared, so nothing can be found again.", *lines))
    twice = found.fetches > 1
    if twice:
        lines.append("It is fetched twice, by the decode worker and by the prefill worker that computes the rest.")
    gain = found.cache_gain_s
    lines.append(
        f"{load.shared:.0%} of {load.prompt:,.0f} prompt tokens are {load.cached:,.0f}, so the first token comes "
        f"{abs(gain) * 1e3:,.0f} ms {'sooner' if gain > 0 else 'later'} and {load.requests_per_s * load.cached:,.0f} "
        "tokens per second need not be computed."
    )
    if gain <= 0:
        lines.append(
            f"Fetching{' twice' * twice} is slower than computing here, and workers fetch all that there is. Hits in a "
            "worker's own pool cost nothing: keep requests with the pool that has their prefix (TRINE_AFFINITY)"
            f"{'' if load.one_machine else ', workers that share prefixes on one machine (--one-machine)'}, and the "
            "cache beyond it small (TRINE_CACHE_BYTES, TRINE_HOST_CACHE_MB)."
        )
    return Advice("prefix cache", gain > 0, tuple(lines))


def _codec(found: Plan) -> Advice:
    plans = by_codec(found)
    name, plain = found.costs.codec, plans[0]
    lines = []
    for other in plans:
        whole = other.load.prompt + other.load.output
        lines.append(
            f"{other.costs.codec}: {other.costs.kv_bytes:,.0f} bytes a token; {other.costs.fitting(whole):,} sequences "
            f"fit; {_needs(other)}; {other.traffic.moved / 1e6:,.0f} MB/s through NATS."
        )
    pays = found.rank < plain.rank
    if pays:
        lines.append(f"{name} instead of none: {_saved(found, plain)}. Measure first what it costs: trine check.")
    elif name != "none":
        lines.append("Against none it saves no worker and no server here; it is planned because it was asked for.")
    best = min(plans, key=lambda one: one.rank)
    if best.rank < found.rank:
        lines.append(
            f"{best.costs.codec} would do better: {_saved(best, found)}. It changes answers more than {name}, so it "
            f"is for you to choose: trine check, then --kv-codec {best.costs.codec}."
        )
    elif name == "none":
        lines.append("A codec would save no worker and no server here: leave KV as it is.")
    return Advice(f"KV codec {name}", pays, tuple(lines))


def _needs(found: Plan) -> str:
    return (
        f"{found.workers.prefill} prefill and {found.workers.decode} decode workers, {found.traffic.fleets} NATS "
        f"server{'s' * (found.traffic.fleets > 1)}{', and it is NOT POSSIBLE' if found.problems else ''}"
    )


def _saved(less: Plan, more: Plan) -> str:
    if len(less.problems) < len(more.problems):
        return f"possible, where {more.costs.codec} is not ({more.problems[0]})"
    workers, servers = (less.workers.machines, more.workers.machines), (less.traffic.fleets, more.traffic.fleets)
    both = ((workers, "workers"), (servers, "NATS servers"))
    return " and ".join(f"{few:,} instead of {many:,} {what}" for (few, many), what in both if few != many)


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
    drafting, trial, on = found.load.drafting, found.trial, found.usual.depth > 0
    if trial is None:
        why = "No acceptance was given: `trine check --drafter` tells it, or a running fleet's metrics do."
        return Advice("speculation", False, (why,))
    plain, best = trial.plain, trial.drafted
    terms = " + ".join(["1", *(f"{drafting.acceptance:g}^{i}" for i in range(1, min(best.depth, 3) + 1))])
    lines = [
        f"This load brings each decode worker, of {trial.workers}, {plain.sequences} sequences at once, with "
        f"{plain.step_s * 1e3:.1f} ms a step.",
        f"With {best.depth} drafts it is {best.sequences}, a step brings {terms}{' + …' if best.depth > 3 else ''} = "
        f"{best.tokens:.2f} tokens and takes {best.step_s * 1e3:.1f} ms: a token in {best.tpot_s * 1e3:.1f} ms instead "
        f"of {plain.tpot_s * 1e3:.1f}, {trial.gain:.2f} times as fast.",
    ]
    if on:
        lines.append(
            f"With {found.full.sequences} sequences at once, the most, the best depth is {found.full.depth}: the "
            "fuller a step, the more each draft costs."
        )
    elif trial.gain < WORTH:
        lines.append(f"That is less than {WORTH:g} times and does not pay for a drafter: none is planned.")
    else:
        lines.append("But steps that check drafts are longer: first tokens in time would need more workers.")
    return Advice("speculation", on, tuple(lines))


def _prefill_workers(found: Plan) -> Advice:
    load, designs = found.load, by_roles(found.costs, found.load)
    together = designs[0]
    size = min(together.mixed, math.ceil(load.computed))
    chunk_s = size / together.prefill_rate
    pause_s = together.usual.step_s + chunk_s
    lines = [
        f"A decode worker that computes prompts itself adds up to {size:,} of their tokens to a step of at most "
        f"{together.step_tokens:,}: {size:,} / {together.prefill_rate:,.0f} = {chunk_s * 1e3:,.0f} ms, so running "
        f"answers pause for {pause_s * 1e3:,.0f} ms while a prompt comes in; that is {1 - together.usual.share:.0%} of "
        "the time.",
        *(_design(one) for one in designs),
    ]
    if len(designs) == 1:
        lines.append(
            f"Only {load.computed:,.0f} tokens of a prompt are computed: no prefill worker is asked for "
            f"{LOCAL_TOKENS} or less."
        )
    elif found.workers.prefill:
        lines.append(f"With them {_reason(designs[1], together)}.")
    else:
        lines.append(f"Without them {_reason(together, designs[1])}.")
        if pause_s > load.tpot_s and not designs[1].problems:
            lines.append(
                f"Single tokens come later than the {load.tpot_s * 1e3:g} ms that are kept to on average. Where that "
                "matters have prefill workers, or a smaller TRINE_MIXED_TOKENS at the price of later first tokens."
            )
    return Advice("prefill workers", found.workers.prefill > 0, tuple(lines))


def _design(one: Plan) -> str:
    first = f"{one.ttft_s * 1e3:,.0f} ms" if math.isfinite(one.ttft_s) else "ever longer"
    missed = f"; NOT POSSIBLE: {'; '.join(one.problems)}" if one.problems else ""
    return (
        f"{'With' if one.workers.prefill else 'Without'} prefill workers: {one.workers.prefill} + "
        f"{one.workers.decode}, first token after {first}, then one every {one.usual.tpot_s * 1e3:.1f} ms, "
        f"{one.traffic.moved / 1e6:,.0f} MB/s through {one.traffic.fleets} NATS "
        f"server{'s' * (one.traffic.fleets > 1)}{missed}."
    )


def _reason(chosen: Plan, other: Plan) -> str:
    """Why one design is better: the first difference in rank."""
    if len(chosen.problems) < len(other.problems):
        return "the targets are met" if not chosen.problems else "fewer targets are missed"
    if chosen.rank < other.rank:
        return f"it takes {_saved(chosen, other)}"
    return "as many workers do, and no prompt's KV has to be sent"


def _nats(found: Plan) -> Advice:
    flow, load = found.traffic, found.load
    enough = PLANNED / flow.share * load.requests_per_s
    read = flow.got + flow.fetched
    lines = [
        f"Blocks written {flow.put / 1e6:,.0f} MB/s, read {read / 1e6:,.0f} MB/s: "
        f"{flow.bytes_share:.0%} of the {SERVER_RATE / 1e6:,.0f} MB/s of one server.",
        f"{flow.messages:,.0f} messages per second of {MESSAGE_RATE:,.0f} ({flow.messages / MESSAGE_RATE:.0%}); "
        f"{flow.requests:,.1f} requests per second of {QUEUE_RATE:,.0f} ({flow.requests / QUEUE_RATE:.0%}).",
        f"One server is enough up to {enough:,.1f} requests per second (at {PLANNED:.0%} of its limit).",
    ]
    links = math.ceil(flow.got / (LINK_RATE * BUSY) - 1e-9)
    if links > 1:
        lines.append(
            f"Decode workers read {flow.got / 1e6:,.0f} MB/s, each at most {LINK_RATE / 1e6:,.0f} MB/s and {BUSY:.0%} "
            f"of the time: there are {links} at least."
        )
    if flow.fleets > 1:
        others = ["a codec" * (found.costs.codec == "none"), "all workers of a fleet on one machine" * (read > 0)]
        fewer = " or ".join(filter(None, [*others, "no prefill workers" * (found.workers.prefill > 0)]))
        lines.append(
            f"This load needs {flow.fleets} fleets with a server each, and a worker of each role in each"
            f"{f'; or fewer bytes: {fewer}' * bool(fewer)}. A cluster does not help: a model's blocks are one stream, "
            "on one server."
        )
    return Advice("one NATS server", flow.fleets == 1, tuple(lines))
