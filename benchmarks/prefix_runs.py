"""The prefix benchmark's measurements. Each starts a fleet of its own, and checks that it measured what it says."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.prefix_fleet import ENV, PREFILL, READY_S, Answer, Beats, decode_worker, require, warm_up
from benchmarks.prefix_sets import Ask, agent_set, best_share, rag_set, reading
from shared.tokenizer import Tokenizer
from trine.client import Client
from trine.supervisor import Fleet

BLOCK = 16
PROMPT_TOKENS = 1024
ROUNDS = 5
SET_TOKENS = 4
WITHOUT_CACHE = 8
PAUSE_S = 1.0
"""After a prompt that only the benchmark computes again, so that storing its blocks falls on nobody else."""
OVERLAP: dict[int, int] = {512: 3, 2048: 3, 4096: 1}
"""Prompts per length in tokens."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(some) / statistics.median(others)


def overhead(ttft_ms: float, step_ms: float) -> float:
    """The share of the time to the first token in which no forward pass ran."""
    return (ttft_ms - step_ms) / ttft_ms


def cached_share(answers: Sequence[Answer]) -> float:
    """Of all prompt tokens."""
    return sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers)


# One prompt, cold and warm


@dataclass(slots=True)
class Stage:
    """Times to the first token of the prompts sent to one worker, in ms."""

    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, float]:
        return {
            "cold_ttft_ms": statistics.median(self.cold),
            "warm_ttft_ms": statistics.median(self.warm),
            "warm_over_cold": ratio(self.warm, self.cold),
        }


@dataclass(frozen=True, slots=True)
class Tier:
    """Where a worker finds blocks, told by which counter of its beat counts them; None: in its own pool."""

    name: str
    counter: str | None


POOL, HOST, NATS = Tier("same_worker", None), Tier("host_tier", "cache_host_hit"), Tier("nats", "cache_hit")


def measure_reuse(tokenizer: Tokenizer, rounds: int = ROUNDS) -> dict[str, Any]:
    """Prompts computed by one worker's first requests, warm on that worker, on one that shares memory, on another.

    One decode worker lives at a time, so that it is known who answers. Every stage has cold prompts of its own, which
    take turns with the warm ones, so that a busy neighbour slows both.
    """
    prompts = iter([reading(tokenizer, number, PROMPT_TOKENS) for number in range(3 * rounds)])
    first = [next(prompts) for _ in range(rounds)]
    stages: dict[str, Stage] = {}
    with ExitStack() as living:
        fleet = Fleet({"prefill": 1}, env=ENV)
        living.enter_context(fleet)
        fleet.wait_ready(READY_S)
        before = ExitStack()
        for number, tier in enumerate((POOL, HOST, NATS), 1):
            worker = ExitStack()
            env = {"TRINE_HOST_CACHE_MB": "0"} if tier is NATS else {}
            name = worker.enter_context(decode_worker(number, fleet.url, env))
            living.push(worker)
            before.close()  # only now: what was found warm may not depend on who is gone
            cold = first if tier is POOL else [next(prompts) for _ in range(rounds)]
            stages[tier.name] = asyncio.run(_stage(fleet, name, tier, cold, first))
            say(f"{tier.name}: {stages[tier.name].as_dict()}")
            before = worker
    result: dict[str, Any] = {"rows": {f"1,024 tokens, {name}": stage.as_dict() for name, stage in stages.items()}}
    return result | {f"warm_over_cold_{name}": stage.as_dict()["warm_over_cold"] for name, stage in stages.items()}


async def _stage(fleet: Fleet, worker: str, tier: Tier, cold: Sequence[str], warm: Sequence[str]) -> Stage:
    stage = Stage()
    async with Client(fleet.url, fleet.model) as client, Beats(fleet.url, fleet.model) as beats:
        await warm_up(client, [worker])
        for new, known in zip(cold, warm, strict=True):
            answer = await _read(client, worker, new)
            answer.require_cold()
            stage.cold.append(answer.ttft_ms)
            await asyncio.sleep(PAUSE_S)
            before = await beats.fresh([worker])
            answer = await _read(client, worker, known)
            stage.warm.append(answer.ttft_ms)
            require_warm(answer, tier, await beats.fresh([worker]) - before)
    return stage


async def _read(client: Client, worker: str, prompt: str) -> Answer:
    answer = Answer.of(await client.generate(prompt, max_tokens=2, temperature=0.0))
    require(answer.decode == worker, f"{answer} should have come from {worker}")
    require(answer.prompt_tokens == PROMPT_TOKENS, f"{answer} should have had {PROMPT_TOKENS} tokens")
    return answer


def require_warm(answer: Answer, tier: Tier, counted: dict[str, int]) -> None:
    """All that can be cached came from this tier, by what the worker counted meanwhile."""
    blocks = (PROMPT_TOKENS - 1) // BLOCK
    require(answer.cached_tokens == blocks * BLOCK, f"{answer} should have found {blocks * BLOCK} tokens in a cache")
    require(answer.prefill == (), f"{answer} should not have been prefilled elsewhere")
    for other in (HOST, NATS):
        found, expected = counted.get(str(other.counter), 0), blocks if other is tier else 0
        require(found == expected, f"{found} instead of {expected} blocks came from {other.name}, {tier.name} wanted")


# Sets of requests


def measure_sets(tokenizer: Tokenizer) -> dict[str, Any]:
    result: dict[str, Any] = {"rows": {}}
    for name, asks in (("rag", rag_set()), ("agent", agent_set())):
        with Fleet({"prefill": 1, "decode": 2}, env=ENV) as fleet:
            fleet.wait_ready(READY_S)
            found = asyncio.run(_set(fleet, asks, WITHOUT_CACHE))
        possible = best_share([tokenizer.chat(ask.messages) for ask in asks], BLOCK)
        row = found.as_dict() | {"cached_share_possible": possible}
        result["rows"][f"{name}, {len(asks)} requests"] = row
        result |= {f"{name}_cached_share": row["cached_share"], f"{name}_ttft_ratio": row["ttft_ratio"]}
        say(f"{name}: {row}")
    return result


@dataclass(slots=True)
class SetAnswers:
    shared: list[Answer] = field(default_factory=list)
    alone: list[Answer] = field(default_factory=list)
    """Of some of the same requests, kept from sharing anything."""

    def as_dict(self) -> dict[str, float]:
        shared, alone = [a.ttft_ms for a in self.shared], [a.ttft_ms for a in self.alone]
        return {
            "prompt_tokens": statistics.mean(a.prompt_tokens for a in self.shared),
            "cached_share": cached_share(self.shared),
            "ttft_p50_ms": statistics.median(shared),
            "ttft_max_ms": max(shared),
            "without_cache_ttft_p50_ms": statistics.median(alone),
            "ttft_ratio": ratio(shared, alone),
        }


def without_cache(asks: int, count: int) -> frozenset[int]:
    """After which of so many requests to send the same again on its own: `count` of them, evenly spread."""
    return frozenset(asks * (2 * i + 1) // (2 * count) for i in range(count))


async def _set(fleet: Fleet, asks: Sequence[Ask], count: int) -> SetAnswers:
    """One after the other; each that shares nothing has a salt of its own."""
    answers, chosen = SetAnswers(), without_cache(len(asks), count)
    async with Client(fleet.url, fleet.model) as client:
        await warm_up(client, ["decode-1", "decode-2"])
        for number, ask in enumerate(asks):
            done = await client.generate(messages=ask.messages, max_tokens=SET_TOKENS, temperature=0.0)
            answers.shared.append(Answer.of(done))
            if number not in chosen:
                continue
            done = await client.generate(
                messages=ask.messages, max_tokens=SET_TOKENS, temperature=0.0, cache_salt=f"alone {number}"
            )
            answers.alone.append(Answer.of(done))
            answers.alone[-1].require_cold()
            await asyncio.sleep(PAUSE_S)
    return answers


# Remote prefill


def measure_overlap(tokenizer: Tokenizer, counts: dict[int, int] = OVERLAP) -> dict[str, Any]:
    """How much longer than its forward passes, the prefill worker's and the decode worker's, a cold prompt takes."""
    sizes = [size for size, count in counts.items() for _ in range(count)]
    random.Random(3).shuffle(sizes)
    prompts = [reading(tokenizer, number, size) for number, size in enumerate(sizes)]
    with Fleet({"prefill": 1, "decode": 1}, env=ENV) as fleet:
        fleet.wait_ready(READY_S)
        measured = asyncio.run(_overlap(fleet, prompts))
    result: dict[str, Any] = {"rows": {}}
    for size in counts:
        pairs = [pair for at, pair in zip(sizes, measured, strict=True) if at == size]
        shares = [overhead(ttft, step) for ttft, step in pairs]
        result["rows"][f"{size:,} tokens, remote"] = {
            "ttft_ms": statistics.median(ttft for ttft, _ in pairs),
            "step_ms": statistics.median(step for _, step in pairs),
            "overhead": statistics.median(shares),
        }
        result[f"overhead_{size}"] = statistics.median(shares)
    return result


async def _overlap(fleet: Fleet, prompts: Sequence[str]) -> list[tuple[float, float]]:
    """(time to first token, time in steps) of each, in ms."""
    workers, measured = (PREFILL, "decode-1"), []
    async with Client(fleet.url, fleet.model) as client, Beats(fleet.url, fleet.model) as beats:
        await warm_up(client, ["decode-1"])
        for prompt in prompts:
            before = await beats.fresh(workers)
            answer = Answer.of(await client.generate(prompt, max_tokens=1, temperature=0.0))
            answer.require_cold()
            steps = (await beats.fresh(workers))["step_ms"] - before["step_ms"]
            measured.append((answer.ttft_ms, float(steps)))
            say(f"{answer.prompt_tokens} tokens: {answer.ttft_ms:.0f} ms, {steps} ms of them in forward passes")
    return measured
