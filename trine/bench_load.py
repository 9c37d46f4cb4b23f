"""Load: when which request is sent, by rate or by how many are answered at once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from shared.errors import InvalidField
from trine.bench_sets import Prompt
from trine.bench_stats import Record


class Target(Protocol):
    """What is measured. `ask` waits for the whole answer, and puts what goes wrong into the record."""

    async def ask(self, prompt: Prompt, max_tokens: int, record: Record) -> None: ...


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` of them: one at every moment of a Poisson process of `rate` a second, or `concurrency` at once.

    With a rate nothing waits for answers, as with users who do not know of each other (an open loop); with a
    concurrency each of so many users asks again when answered (a closed loop). Raises InvalidField unless there is
    exactly one of the two.
    """

    requests: int
    max_tokens: int
    rate: float | None = None
    concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise InvalidField("give a rate or a concurrency", field="rate")
        if self.rate is not None and not self.rate > 0:
            raise InvalidField("rate: it has to be above 0", field="rate")

    def arrivals(self) -> Iterator[float]:
        """Seconds after the start, for a rate: gaps are exponential (a Poisson process), the first one is 0."""
        assert self.rate is not None
        rng, at = random.Random(self.seed), 0.0
        for _ in range(self.requests):
            yield at
            at += rng.expovariate(self.rate)


async def drive(target: Target, prompts: Iterator[Prompt], load: Load) -> list[Record]:
    """All requests' records, in the order they were due. Cancelled: what is being answered is given up."""
    if load.rate is not None:
        return await _open(target, prompts, load)
    return await _closed(target, prompts, load)


async def _open(target: Target, prompts: Iterator[Prompt], load: Load) -> list[Record]:
    began = time.monotonic()
    records = []
    async with asyncio.TaskGroup() as group:
        for at in load.arrivals():
            await asyncio.sleep(began + at - time.monotonic())
            records.append(Record(began + at))
            group.create_task(target.ask(next(prompts), load.max_tokens, records[-1]))
    return records


async def _closed(target: Target, prompts: Iterator[Prompt], load: Load) -> list[Record]:
    assert load.concurrency is not None
    records: list[Record] = []

    async def user() -> None:
        while len(records) < load.requests:
            records.append(record := Record(time.monotonic()))
            await target.ask(next(prompts), load.max_tokens, record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, load.requests)):
            group.create_task(user())
    return records
