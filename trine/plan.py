"""How to deploy a model for a load: how many workers of which kind, which techniques, and when NATS is not enough.

Pure: numbers in, numbers and sentences out (`trine/plan_advice.py`). More load, longer texts, tighter targets, fewer
shared prefixes or fewer accepted drafts never mean fewer prefill or decode workers, where the targets can be met.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shared.errors import InvalidField
from trine.plan_bus import LINK_RATE, MEMORY_RATE, Traffic, traffic
from trine.plan_cost import Costs, Pace, depths
from trine.plan_hardware import Hardware
from trine.plan_load import Load
from trine.plan_model import CODECS, ModelShape

BUSY = 0.8
"""Of their time, workers are planned to work: arrivals are uneven."""
LOCAL_TOKENS = 128
"""`TRINE_LOCAL_PREFILL_TOKENS`: what decode workers compute of a prompt themselves."""
MOST_WORKERS = 100_000
AUTO = ("none", "int8")
"""Of codecs, those that are chosen without being asked for: `int8` is hard to tell from `none`."""


@dataclass(frozen=True, slots=True)
class Workers:
    prefill: int
    decode: int
    drafter: int

    @property
    def machines(self) -> int:
        """That run the whole model."""
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Plan:
    """`problems`: what cannot be had; the rest is planned without it."""

    load: Load
    costs: Costs
    workers: Workers
    full: Pace
    """Of a decode worker with as many sequences as targets and memory allow."""
    usual: Pace
    """Of one with those that this load brings it, and the depth of drafts that is best then."""
    undrafted: Pace
    """The same without drafts."""
    prefill_rate: float
    """Prompt tokens per second of a worker."""
    computed: float
    """Tokens of a prompt that are computed; the others come out of a cache."""
    ttft_s: float
    traffic: Traffic
    together: int
    """Decode workers that would do without prefill workers."""
    problems: tuple[str, ...]


def plan(model: ModelShape, hardware: Hardware, load: Load, codec: str = "auto") -> Plan:
    """Raises InvalidField for numbers that make no sense, or a codec that is none."""
    load.check()
    if codec != "auto" and codec not in CODECS:
        raise InvalidField(f"--kv-codec: auto, {', '.join(CODECS)}", field="kv_codec")
    candidates = [_plan(Costs(model, hardware, name), load) for name in (AUTO if codec == "auto" else (codec,))]
    # A codec is worth it when it saves workers, or servers; of equals the first, which changes least.
    return min(candidates, key=lambda p: (len(p.problems), p.workers.machines, p.traffic.fleets))


def by_codec(found: Plan) -> list[Plan]:
    """The same with each codec, for comparison."""
    return [_plan(replace(found.costs, codec=codec), found.load) for codec in CODECS]


def _plan(costs: Costs, load: Load) -> Plan:
    problems: list[str] = []
    computed = load.prompt * (1.0 - load.shared) if caching_pays(costs, load) else load.prompt
    rate = costs.prefill_rate(load.prompt)
    full = _full(costs, load, problems)
    local = min(computed, LOCAL_TOKENS) / rate
    decode = _count(load.requests_per_s * (load.output / full.rate + local) / BUSY)
    prefill, ttft = 0, local + full.step_s
    if computed > LOCAL_TOKENS:
        prefill, ttft = _prefill(costs, load, computed, full, problems)
    elif ttft > load.ttft_s:
        problems.append(_late(load, ttft))
    paces = [_usual(costs, load, decode, depth, full.sequences) for depth in depths(load.drafting)]
    usual = min(paces, key=lambda pace: pace.tpot_s)
    drafter = 0
    if usual.depth:
        drafter = _count(decode * usual.depth * load.drafting.cost * costs.step_s(1, 1, _context(load)) / usual.step_s)
    return Plan(
        load=load,
        costs=costs,
        workers=Workers(prefill, decode, drafter),
        full=full,
        usual=usual,
        undrafted=paces[0],
        prefill_rate=rate,
        computed=computed,
        ttft_s=ttft,
        traffic=traffic(costs, load, computed, remote=prefill > 0),
        together=_count(load.requests_per_s * (load.output / full.rate + computed / rate) / BUSY),
        problems=tuple(problems),
    )


def _context(load: Load) -> float:
    """Tokens that a sequence has half-way."""
    return load.prompt + load.output / 2


def _full(costs: Costs, load: Load, problems: list[str]) -> Pace:
    whole = load.prompt + load.output
    most = costs.fitting(whole)
    if not most:
        problems.append(
            f"it does not fit: the weights take {costs.model.weight_bytes / 1e9:.1f} GB and one sequence "
            f"{whole * costs.kv_bytes / 1e9:.2f} GB of the {costs.hardware.memory / 1e9:.0f} GB; Trine does not split "
            "a model over several machines"
        )
    pace = costs.pace(_context(load), max(most, 1), load.tpot_s, load.drafting)
    if pace is not None:
        return pace
    alone = costs.pace(_context(load), 1, math.inf, load.drafting)
    unhurried = costs.pace(_context(load), max(most, 1), math.inf, load.drafting)
    assert alone is not None and unhurried is not None  # no target, no miss
    problems.append(
        f"no step is fast enough: even alone a sequence gets a token in {alone.tpot_s * 1e3:.1f} ms, "
        f"{load.tpot_s * 1e3:g} ms are wanted"
    )
    return unhurried


def _usual(costs: Costs, load: Load, workers: int, depth: int, most: int) -> Pace:
    """At the number of sequences at which as many arrive as end (Little's law), at most `most`."""
    arriving = load.requests_per_s * load.output / workers  # tokens per second that each worker has to give
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if costs.paced(middle, depth, _context(load), load.drafting).rate >= arriving:
            high = middle
        else:
            low = middle + 1
    return costs.paced(low, depth, _context(load), load.drafting)


def _prefill(costs: Costs, load: Load, computed: float, full: Pace, problems: list[str]) -> tuple[int, float]:
    """Workers that keep up, and whose queue is short enough for the first token; and that token's time.

    Blocks are sent while later ones are computed: the slower of the two counts, and the way of the last chunk.
    """
    fetch = fetch_s(costs, load)
    service = computed * max(1 / costs.prefill_rate(load.prompt), fetch)
    fixed = service + 2 * min(computed, costs.chunk_tokens()) * fetch + full.step_s
    fixed += (load.prompt - computed) * fetch
    workers = _count(load.requests_per_s * service / BUSY)
    if fixed > load.ttft_s:
        problems.append(_late(load, fixed))
        return workers, fixed + waiting_s(load.requests_per_s, service, workers)
    while fixed + waiting_s(load.requests_per_s, service, workers) > load.ttft_s and workers < MOST_WORKERS:
        workers += 1
    return workers, fixed + waiting_s(load.requests_per_s, service, workers)


def _late(load: Load, ttft_s: float) -> str:
    return f"the first token takes {ttft_s * 1e3:.0f} ms with no queue at all; {load.ttft_s * 1e3:g} ms are wanted"


def waiting_s(per_s: float, service_s: float, workers: int) -> float:
    """Mean time in a queue that so many workers empty, its jobs of about one size: half of what exponential ones wait
    (Sakasegawa 1977)."""
    busy = per_s * service_s / workers
    if busy >= 1:
        return math.inf
    return float(service_s * busy ** (math.sqrt(2 * (workers + 1)) - 1) / (workers * (1 - busy)) / 2)


def fetch_s(costs: Costs, load: Load) -> float:
    """Seconds for one token's KV from another worker."""
    return costs.kv_bytes / (MEMORY_RATE if load.one_machine else LINK_RATE)


def caching_pays(costs: Costs, load: Load) -> bool:
    """Whether a token's KV comes sooner than it is computed."""
    return load.shared > 0 and fetch_s(costs, load) < 1 / costs.prefill_rate(load.prompt)


def _count(of: float) -> int:
    return max(1, min(math.ceil(of - 1e-9), MOST_WORKERS))
