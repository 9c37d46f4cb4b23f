"""Two ways to serve a load: decode workers that compute prompts too, or prefill workers beside them. Pure arithmetic.

Each is sized for itself: its first token, its pace, its bytes on the bus, and what it cannot do. `trine/plan.py`
chooses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trine.forecast import WORTH
from trine.plan_bus import LINK_RATE, Traffic, fetch_s, traffic
from trine.plan_cost import Costs, Drafting, Pace
from trine.plan_decode import BUSY, MOST_WORKERS, Decoding, count, least
from trine.plan_load import Load
from trine.plan_model import BLOCK_SIZE

LOCAL_TOKENS = 128
"""`TRINE_LOCAL_PREFILL_TOKENS`: where no more of a prompt are missing, no prefill worker is asked."""
STEP_TOKENS = 256
"""`TRINE_STEP_TOKENS`, unless set."""
MIXED_ON_CPU = 64
"""`TRINE_MIXED_TOKENS` on a CPU, unless set."""


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
class Trial:
    """What the best number of drafts brings `workers` decode workers at this load."""

    workers: int
    drafted: Pace
    plain: Pace

    @property
    def gain(self) -> float:
        """How many times as fast an answer is."""
        return self.plain.tpot_s / self.drafted.tpot_s


@dataclass(frozen=True, slots=True)
class Plan:
    """`problems`: what cannot be had; the rest is planned without it."""

    load: Load
    costs: Costs
    workers: Workers
    full: Pace
    """Of a decode worker with as many sequences as targets and memory allow."""
    usual: Pace
    """Of one with those that this load brings it."""
    trial: Trial | None
    """Of drafts, by which it was decided whether there are any; None: nothing is known of them."""
    prefill_rate: float
    """Prompt tokens per second of a worker."""
    ttft_s: float
    """Infinite where there are too few workers, which is a problem then."""
    traffic: Traffic
    problems: tuple[str, ...]

    @property
    def rank(self) -> tuple[int, int, int]:
        """Lower is better: what cannot be had, workers, NATS servers."""
        return len(self.problems), self.workers.machines, self.traffic.fleets

    @property
    def fetches(self) -> int:
        """How often a token's KV that was computed before is fetched: by whoever computes the rest, and who decodes."""
        return 2 if self.workers.prefill else 1

    @property
    def cache_gain_s(self) -> float:
        """So much sooner comes the first token for what is fetched, a prompt's beginning; below zero: later."""
        fetch, compute = fetch_s(self.costs, self.load), 1 / self.costs.prefill_rate(self.load.cached / 2)
        instead = max(compute, fetch) if self.workers.prefill else compute  # from a prefill worker it has a way too
        return self.load.cached * (instead - self.fetches * fetch)

    @property
    def step_tokens(self) -> int:
        """For `TRINE_STEP_TOKENS`."""
        return step_tokens(self.full, self.usual)

    @property
    def chunk(self) -> int:
        """Of a prompt, tokens that a decode worker computes in one step."""
        return chunk(self.full, self.usual)

    @property
    def mixed(self) -> int:
        """Of them, as many as answers wait for that go on in the same step."""
        return min(self.chunk, MIXED_ON_CPU) if self.costs.hardware.on_cpu else self.chunk


def step_tokens(full: Pace, usual: Pace) -> int:
    """Of a step: beside all tokens and drafts there is room for some of a prompt."""
    return max(STEP_TOKENS, max(full.positions, usual.positions) + STEP_TOKENS // 2)


def chunk(full: Pace, usual: Pace) -> int:
    return step_tokens(full, usual) - usual.positions


def designed(costs: Costs, load: Load, *, apart: bool) -> Plan:
    """`apart`: prompts are computed by workers of their own. Drafts are planned where they pay, else not at all."""
    build = _apart if apart else _together
    drafted = build(costs, load, load.drafting)
    if drafted.trial is None:
        return drafted
    plain = replace(build(costs, load, Drafting(0.0, load.drafting.cost)), trial=drafted.trial)
    return drafted if drafted.trial.gain >= WORTH and drafted.rank <= plain.rank else plain


def _together(costs: Costs, load: Load, drafting: Drafting) -> Plan:
    """Decode workers compute prompts in turn, each a chunk a step, beside a token for each answer that is running."""
    decoding = Decoding(costs, load, drafting, load.computed / prefill_rate(costs, load))
    flow = traffic(costs, load, remote=False)

    def service_s(workers: int) -> float:
        usual = best(decoding.usual(workers))
        return decoding.local_s + math.ceil(load.computed / chunk(decoding.full(workers), usual)) * usual.step_s

    def ttft_s(workers: int) -> float:
        """A worker takes a request when it has room for it, not when it has time: each has a queue of its own."""
        service = service_s(workers)
        return load.cached * fetch_s(costs, load) + service + waiting_s(load.requests_per_s / workers, service, 1)

    problems = _problems(decoding)
    fewest = _fewest(decoding, flow, problems)
    fewest = least(fewest, lambda n: load.requests_per_s / n * service_s(n) <= BUSY) or _too_many(problems)
    workers = least(fewest, lambda n: ttft_s(n) <= load.ttft_s)
    if workers is None:
        problems += _late(load, ttft_s(MOST_WORKERS))
    return _plan(decoding, 0, workers or fewest, ttft_s(workers or fewest), flow, problems)


def _apart(costs: Costs, load: Load, drafting: Drafting) -> Plan:
    """Decode workers compute what is no whole block, at most one.

    Blocks are sent while later ones are computed: the slower of the two counts, and the way of the last chunk. What
    was computed before, the decode worker fetches, and then the prefill worker.
    """
    rate, fetch = prefill_rate(costs, load), fetch_s(costs, load)
    decoding = Decoding(costs, load, drafting, min(load.computed, BLOCK_SIZE) / rate)
    # The last step is that of a worker as busy as planned, so that more load never makes it shorter.
    full = decoding.unhindered
    last = decoding.bearing(BUSY * full.rate, full.depth, full.sequences, full.share)
    fixed = 2 * load.cached * fetch + load.computed * max(1 / rate, fetch)
    fixed += 2 * min(load.computed, costs.chunk_tokens()) * fetch + decoding.local_s + last.step_s
    # Others are computed while blocks are on their way, until the worker's link is the limit.
    service = max(load.computed / rate, load.prompt * fetch)
    flow = traffic(costs, load, remote=True)

    def ttft_s(workers: int) -> float:
        return fixed + waiting_s(load.requests_per_s, service, workers)

    problems = _problems(decoding)
    decode = _fewest(decoding, flow, problems)
    needed = max(load.requests_per_s * service / BUSY, float(flow.fleets))
    fewest = count(needed) if needed <= MOST_WORKERS else _too_many(problems)
    workers = least(fewest, lambda n: ttft_s(n) <= load.ttft_s)
    if workers is None:
        problems += _late(load, fixed)
    return _plan(decoding, workers or fewest, decode, ttft_s(workers or fewest), flow, problems)


def _fewest(decoding: Decoding, flow: Traffic, problems: list[str]) -> int:
    """Decode workers that keep up with answers, and with the blocks that they read; one in each fleet at least."""
    needed = max(decoding.least() or math.inf, flow.got / (LINK_RATE * BUSY), float(flow.fleets))
    return count(needed) if needed <= MOST_WORKERS else _too_many(problems)


def _plan(decoding: Decoding, prefill: int, decode: int, ttft_s: float, flow: Traffic, problems: list[str]) -> Plan:
    paces = decoding.usual(decode)
    usual = best(paces)
    drafter = decoding.drafters(decode, usual)
    return Plan(
        load=decoding.load,
        costs=decoding.costs,
        workers=Workers(prefill, decode, max(drafter, flow.fleets) if drafter else 0),
        full=decoding.full(decode),
        usual=usual,
        trial=Trial(decode, best(paces[1:]), paces[0]) if paces[1:] else None,
        prefill_rate=prefill_rate(decoding.costs, decoding.load),
        ttft_s=ttft_s,
        traffic=flow,
        problems=tuple(problems),
    )


def best(paces: Sequence[Pace]) -> Pace:
    """The fastest for each answer."""
    return min(paces, key=lambda pace: pace.tpot_s)


def _problems(decoding: Decoding) -> list[str]:
    load, costs = decoding.load, decoding.costs
    whole = load.prompt + load.output
    problems = []
    if not costs.fitting(whole):
        problems.append(
            f"it does not fit: the weights take {costs.model.weight_bytes / 1e9:.1f} GB and one sequence "
            f"{whole * costs.kv_bytes / 1e9:.2f} GB of the {costs.hardware.memory / 1e9:.0f} GB; Trine does not split "
            "a model over several machines"
        )
    if (alone := decoding.alone.tpot_s) > load.tpot_s:
        problems.append(
            f"no step is fast enough: even alone a sequence gets a token in {alone * 1e3:.1f} ms, "
            f"{load.tpot_s * 1e3:g} ms are wanted"
        )
    return problems


def _late(load: Load, ttft_s: float) -> list[str]:
    """`ttft_s` without a queue. Infinite: so many workers would be needed that they are the problem."""
    if not math.isfinite(ttft_s):
        return []
    return [f"the first token takes {ttft_s * 1e3:,.0f} ms with no queue at all; {load.ttft_s * 1e3:g} ms are wanted"]


def _too_many(problems: list[str]) -> int:
    """Says so, once; returns the most."""
    if (problem := f"more than {MOST_WORKERS:,} workers of a role would be needed") not in problems:
        problems.append(problem)
    return MOST_WORKERS


def waiting_s(per_s: float, service_s: float, workers: int) -> float:
    """Mean time in a queue that so many workers empty, its jobs of about one size: half of what exponential ones wait
    (Sakasegawa 1977)."""
    busy = per_s * service_s / workers
    if busy >= 1:
        return math.inf
    return float(service_s * busy ** (math.sqrt(2 * (workers + 1)) - 1) / (workers * (1 - busy)) / 2)


def prefill_rate(costs: Costs, load: Load) -> float:
    """Prompt tokens per second of one worker: those that are computed are a prompt's last ones."""
    return costs.prefill_rate(load.prompt - load.computed / 2)
