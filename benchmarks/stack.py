"""The whole stack, measured: time to first token cold and warm, and tokens per second with and without drafts.

`python -m benchmarks.stack [--json]`. Everything is measured in one run on one fleet (1 prefill, 1 decode, 1 drafter);
what counts are the ratios. Runs with and without drafts alternate, medians are given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence

from trine.client import Client
from trine.prepare import prepare
from trine.supervisor import Fleet

ROUNDS = 3
PROMPTS = (
    "What is the difference between weather and climate?",
    "Write a polite e-mail asking for a day off next Friday.",
    "Explain what a database index is to a new programmer.",
    "Give a recipe for pancakes with exact amounts.",
    "Name the planets of the solar system in order.",
    "Why do leaves change their colour in autumn?",
    "Describe a typical day of a baker.",
    "How do I make a simple tomato soup?",
)


def context(number: int) -> str:
    """About 1,000 tokens that no other number shares a block of."""
    rows = (f"Box {number}-{i}: {i * number % 97} bolts, {i * 7 % 13} nuts, shelf {i % 9}." for i in range(44))
    return f"Inventory {number}.\n" + "\n".join(rows)


async def first_token_ms(client: Client, prompt: str, question: str) -> tuple[float, int]:
    """(milliseconds, cached tokens)"""
    answer = await client.generate(f"{prompt}\n{question}", max_tokens=2, temperature=0.0)
    return answer.timings.ttft_ms, answer.usage.cached_tokens


async def tokens_per_second(client: Client, prompts: Sequence[str]) -> float:
    started = time.monotonic()
    answers = await asyncio.gather(
        *(client.generate(messages=[{"role": "user", "content": p}], max_tokens=48, temperature=0.0) for p in prompts)
    )
    return sum(a.usage.completion_tokens for a in answers) / (time.monotonic() - started)


async def measure_prefix(fleet: Fleet) -> dict[str, float]:
    cold, warm, cached = [], [], 0
    async with Client(fleet.url, fleet.model) as client:
        for number in range(1, ROUNDS + 1):
            prompt = context(number)
            cold.append((await first_token_ms(client, prompt, "How many bolts are in box 3?"))[0])
            await asyncio.sleep(1)
            ms, cached = await first_token_ms(client, prompt, "On which shelf is box 5?")
            warm.append(ms)
    return {
        "cold_ttft_ms": statistics.median(cold),
        "warm_ttft_ms": statistics.median(warm),
        "warm_over_cold": statistics.median(warm) / statistics.median(cold),
        "cached_tokens": cached,
    }


async def measure_rate(fleet: Fleet, prompts: Sequence[str]) -> float:
    async with Client(fleet.url, fleet.model) as client:
        return await tokens_per_second(client, prompts)


def set_drafter(fleet: Fleet, on: bool) -> None:
    if on:
        fleet.release("drafter-1")
        fleet.wait_ready(120)
    else:
        fleet.hold("drafter-1")
        fleet.kill("drafter-1")
        time.sleep(fleet.settings.peer_timeout_s + 1)


def measure() -> dict[str, dict[str, object]]:
    fleet = Fleet({"prefill": 1, "decode": 1, "drafter": 1})
    prepare(fleet.settings.model)
    with fleet:
        fleet.wait_ready(180)
        prefix = asyncio.run(measure_prefix(fleet))
        rates: dict[tuple[int, bool], list[float]] = {}
        for _ in range(ROUNDS):
            for drafter in (True, False):
                if drafter != ("drafter-1" in fleet.pids()):
                    set_drafter(fleet, drafter)
                for count in (1, 8):
                    rates.setdefault((count, drafter), []).append(asyncio.run(measure_rate(fleet, PROMPTS[:count])))
    return {
        "prefix": dict(prefix),
        "tokens_per_second": {
            f"{count} at once": {
                "with_drafter": statistics.median(rates[count, True]),
                "without": statistics.median(rates[count, False]),
                "ratio": statistics.median(rates[count, True]) / statistics.median(rates[count, False]),
            }
            for count in (1, 8)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    result = measure()
    if arguments.json:
        print(json.dumps(result))
        return
    for group, values in result.items():
        print(group)
        for name, value in values.items():
            print(f"  {name}: {value}")


if __name__ == "__main__":
    main()
