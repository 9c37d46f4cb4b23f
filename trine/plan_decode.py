"""Decode workers for a load: how many keep up, and how fast each of them is then. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from trine.plan_cost import Costs, Drafting, Pace, depths
from trine.plan_load import Load

BUSY = 0.8
"""Of their time, workers are planned to work: arrivals are uneven."""
MOST_WORKERS = 100_000


@dataclass(frozen=True, slots=True)
class Decoding:
    """`local_s`: what a decode worker needs for that part of a prompt which it computes itself."""

    costs: Costs
    load: Load
    drafting: Drafting
    local_s: float

    @property
    def context(self) -> float:
        """Tokens that a sequence has half-way."""
        return self.load.prompt + self.load.output / 2

    @property
    def fitting(self) -> int:
        """Sequences, at least one."""
        return max(self.costs.fitting(self.load.prompt + self.load.output), 1)

    @property
    def alone(self) -> Pace:
        """Of a sequence that has a worker to itself, and no prompts beside it."""
        return min((self._paced(1, depth, 1.0) for depth in depths(self.drafting)), key=lambda pace: pace.tpot_s)

    @property
    def tpot_s(self) -> float:
        """What is aimed at: the target, or none where not even a sequence alone reaches that."""
        return self.load.tpot_s if self.alone.tpot_s <= self.load.tpot_s else math.inf

    def share(self, workers: int) -> float:
        """Of a worker's time, what prompts leave for answers: no less than what a worker does not have to be busy."""
        return max(1.0 - self.load.requests_per_s * self.local_s / workers, 1.0 - BUSY)

    @property
    def unhindered(self) -> Pace:
        """Of a full worker that computes no prompts."""
        pace = self.costs.pace(self.context, self.fitting, self.tpot_s, self.drafting)
        assert pace is not None  # a sequence alone keeps to that
        return pace

    def least(self) -> int | None:
        """Workers that keep up; None: no number of them does."""
        each_s = self.load.output / self.unhindered.rate + self.local_s
        return least(count(self.load.requests_per_s * each_s / BUSY), self.keep_up)

    def keep_up(self, workers: int) -> bool:
        """Whether so many do, within the target, and are no busier than planned."""
        prompts = self.load.requests_per_s * self.local_s / workers
        pace = self.costs.pace(self.context, self.fitting, self.tpot_s, self.drafting, self.share(workers))
        if pace is None or prompts >= BUSY:
            return False
        return self._arriving(workers) * pace.share / pace.rate + prompts <= BUSY + 1e-9

    def full(self, workers: int) -> Pace:
        """With as many sequences as target and memory allow."""
        pace = self.costs.pace(self.context, self.fitting, self.tpot_s, self.drafting, self.share(workers))
        return pace or self._paced(1, self.alone.depth, self.share(workers))

    def usual(self, workers: int) -> list[Pace]:
        """By depth of drafts, with the sequences that this load brings one of so many workers (Little's law): as many
        arrive as end."""
        most, share = self.full(workers).sequences, self.share(workers)
        return [self.bearing(self._arriving(workers), depth, most, share) for depth in depths(self.drafting)]

    def bearing(self, rate: float, depth: int, most: int, share: float) -> Pace:
        """With the fewest sequences, of at most `most`, that give so many tokens per second; or with that many."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self._paced(middle, depth, share).rate >= rate:
                high = middle
            else:
                low = middle + 1
        return self._paced(low, depth, share)

    def drafters(self, workers: int, usual: Pace) -> int:
        """That draft for so many decode workers."""
        if not usual.depth:
            return 0
        drafts_s = self.costs.drafts_s(usual.sequences, usual.depth, self.context, self.drafting)
        return count(workers * drafts_s / usual.step_s / BUSY)

    def _arriving(self, workers: int) -> float:
        """Tokens per second that each worker has to give."""
        return self.load.requests_per_s * self.load.output / workers

    def _paced(self, sequences: int, depth: int, share: float) -> Pace:
        return self.costs.paced(sequences, depth, self.context, self.drafting, share)


def count(of: float) -> int:
    return max(1, min(math.ceil(of - 1e-9), MOST_WORKERS))


def least(first: int, good: Callable[[int], bool]) -> int | None:
    """The fewest workers from `first` on that are enough; more are enough too. None: no number of them is."""
    if good(first):
        return first
    low, high = first, min(2 * first, MOST_WORKERS)
    while not good(high):
        if high == MOST_WORKERS:
            return None
        low, high = high, min(2 * high, MOST_WORKERS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high
