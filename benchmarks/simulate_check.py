"""The simulation against real fleets of one and two workers: `python -m benchmarks.simulate --check`.

The same prompts are asked of both. The machine should be quiet: the simulation knows of no neighbours.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.bars import judged
from benchmarks.simulate_costs import Costs
from benchmarks.simulate_fleet import Fleet as Simulated
from benchmarks.simulate_world import Load, Result, Shape
from trine.client import Client
from trine.supervisor import Fleet

READY_S, ANSWER_S = 240.0, 300.0
MOST_ERROR = 0.15
CHANCE_STEPS = 8


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    counts: Mapping[str, int]
    load: Load
    judged: tuple[str, ...] = ("tokens_per_s",)

    @property
    def shape(self) -> Shape:
        counts = self.counts
        return Shape(counts.get("prefill", 0), counts.get("decode", 0), counts.get("drafter", 0))


CASES = (
    Case(
        "1 decode, 4 chats at once",
        {"decode": 1},
        Load(16, 64, 48, concurrency=4, spread=0.5),
        ("tokens_per_s", "tpot_ms"),
    ),
    Case(
        "2 decode, 8 chats at once",
        {"decode": 2},
        Load(24, 64, 48, concurrency=8, spread=0.5),
        ("tokens_per_s", "tpot_ms"),
    ),
    Case(
        "1 prefill + 1 decode, long prompts", {"prefill": 1, "decode": 1}, Load(10, 768, 24, concurrency=2, spread=0.5)
    ),
    Case(
        "2 prefill + 1 decode, long prompts", {"prefill": 2, "decode": 1}, Load(12, 768, 24, concurrency=3, spread=0.5)
    ),
    Case(
        "the same prefix again", {"prefill": 1, "decode": 1}, Load(16, 768, 16, concurrency=2, shared=0.9, spread=0.5)
    ),
    Case("1 decode + 1 drafter, 1 chat", {"decode": 1, "drafter": 1}, Load(6, 64, 96, concurrency=1, spread=0.5)),
)


@dataclass(frozen=True, slots=True)
class Real:
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    load: Load
    accepted: tuple[float, ...] = ()
    """Share of each request's drafts that were right; of none, where none were made."""


def check(costs: Costs, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Real fleets with the default model."""
    return _checked(CASES, lambda case: _real(case, case.load, rounds), lambda case: case.shape, costs, say)


def check_paced(costs: Costs, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Real workers whose engines only take their time."""
    from benchmarks import simulate_paced as paced

    given = paced.paced(costs)
    return _checked(paced.CASES, lambda case: paced.real(case, case.load, rounds, given), paced.shape, given, say)


def _checked(
    cases: Sequence[Case],
    real: Callable[[Case], Coroutine[Any, Any, list[Real]]],
    shape: Callable[[Case], Shape],
    costs: Costs,
    say: Callable[[str], None],
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for case in cases:
        reals = asyncio.run(real(case))
        rows[case.name] = row = compared(reals, [played(shape(case), costs, r) for r in reals])
        for name, pair in row.items():
            bar = "" if name in case.judged else ", not judged"
            say(f"{case.name}: {name} real {pair['real']:.1f}, simulated {pair['simulated']:.1f} "
                f"({pair['error']:+.0%}{bar})")  # fmt: skip
    worst = max(abs(rows[case.name][name]["error"]) for case in cases for name in case.judged)
    judged_on = {case.name: case.judged for case in cases}
    return {
        "rows": rows,
        "judged": judged_on,
        "bars": judged({"worst_error": worst}, {"worst_error": ("<=", MOST_ERROR)}),
    }


def played(shape: Shape, costs: Costs, real: Real) -> Result:
    """What was asked of real workers; drafts are right as often as theirs were."""
    load = real.load
    if real.accepted:
        chances = tuple(chance(share, shape, costs, load) for share in real.accepted)
        load = replace(load, acceptances=chances)
    return Simulated(shape, costs).run(load)


def chance(accepted: float, shape: Shape, costs: Costs, load: Load) -> float:
    """Of a draft to be right if those before it are, where this share of all is right: all that follow a wrong one are
    wrong, so it depends on how many are made, and is sought by playing."""
    low, high = 0.0, 1.0
    for _ in range(CHANCE_STEPS):
        middle = (low + high) / 2
        result = Simulated(shape, costs).run(replace(load, acceptances=(middle,) * load.requests))
        if result.accepted < accepted * result.drafted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def compared(reals: list[Real], results: list[Result]) -> dict[str, dict[str, float]]:
    """By measure: medians of the rounds, of what was simulated for each, and its error."""
    said: dict[str, Callable[[Result], float]] = {
        "tokens_per_s": lambda result: result.tokens_per_s,
        "ttft_ms": lambda result: statistics.median(result.ttft_s) * 1e3,
        "tpot_ms": lambda result: statistics.median(result.tpot_s) * 1e3,
    }
    found = {}
    for name, measure in said.items():
        simulated = statistics.median(measure(result) for result in results)
        real = statistics.median(getattr(r, name) for r in reals)
        found[name] = {"real": real, "simulated": simulated, "error": simulated / real - 1.0}
    return found


async def _real(case: Case, load: Load, rounds: int) -> list[Real]:
    """Each round asks prompts that no other has."""
    with Fleet(case.counts, env={"TRINE_THREADS": "1"}) as fleet:
        await asyncio.to_thread(fleet.wait_ready, READY_S)
        async with Client(fleet.url, fleet.model) as client:
            await asked(client, Load(2, 320, 16, concurrency=1, seed=99))
            return [await asked(client, replace(load, seed=load.seed + 10 * turn)) for turn in range(rounds)]


async def asked(client: Client, load: Load) -> Real:
    """The load, asked of a running fleet."""
    left = list(reversed(list(enumerate(zip(load.prompts(), load.outputs(), strict=True)))))
    ttft: list[float] = []
    tpot: list[float] = []
    accepted: dict[int, float] = {}

    async def one(number: int, prompt: tuple[int, ...], output: int) -> None:
        began = time.perf_counter()
        first = last = 0.0
        stream = client.stream(token_ids=list(prompt), max_tokens=output, min_tokens=output, temperature=0.0)
        async for _ in stream:
            last = time.perf_counter()
            first = first or last
        ttft.append(first - began)
        tpot.append((last - first) / (output - 1))
        use = stream.completion.usage
        if use.drafted_tokens:
            accepted[number] = use.accepted_tokens / use.drafted_tokens

    async def asker() -> None:
        while left:
            number, (prompt, output) = left.pop()
            await one(number, prompt, output)

    started = time.perf_counter()
    async with asyncio.timeout(ANSWER_S):
        await asyncio.gather(*(asker() for _ in range(load.concurrency)))
    seconds = time.perf_counter() - started
    return Real(
        sum(load.outputs()) / seconds,
        statistics.median(ttft) * 1e3,
        statistics.median(tpot) * 1e3,
        load,
        tuple(accepted.get(number, 0.0) for number in range(load.requests)) if accepted else (),
    )
