"""How long to wait for what another worker computes before computing it here too. Pure: time is passed in, in seconds.

A worker that has several jobs takes turns at them, so that no block of one may come for long while it works hard. Then
computing the same here brings nothing, and takes the processor from nobody but ourselves. So whatever a worker that is
known to be at it gets done counts, for a while; one that is dead or stuck gets nothing done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PATIENCES = 3
"""Without a new block for so many times the patience, nobody is waited for any more who is not seen at work."""
TURNS = 8
"""Nor who is, for so many times the patience: as many jobs as a prefill worker has at once, unless set otherwise."""


@dataclass(slots=True)
class Patience:
    """Of one who waits for blocks, up to `limit` seconds for each worker that has to bring them."""

    limit: float
    progress: float
    """When the last block came; when the waiting began, if none has."""
    since: float
    """Since when claim `leader` is the one to wait for."""
    leader: int = 0
    busy: float = float("-inf")
    """When the worker that is waited for last got anything done."""
    _done: Mapping[str, int] = field(default_factory=dict)

    def follow(self, leader: int, now: float) -> None:
        """This claim is the one to wait for."""
        if leader != self.leader:
            self.since = now if self.leader else self.since
            self.leader = leader

    def hear(self, worker: str, done: Mapping[str, int], now: float) -> None:
        """`worker` is the one to wait for, "" if that is not known; `done`: how much each worker that is there has
        computed so far. To be told at the beginning too, or the first round tells nothing."""
        if worker in done and done[worker] > self._done.get(worker, done[worker]):
            self.busy = now
        self._done = done

    def over(self, now: float) -> bool:
        """With this leader."""
        return now - max(self.progress, self.since, self.busy) > self.limit or self._long_enough(now)

    def quite_over(self, now: float) -> bool:
        """With all of them."""
        return now - max(self.progress, self.busy) > PATIENCES * self.limit or self._long_enough(now)

    def _long_enough(self, now: float) -> bool:
        return now - self.progress > TURNS * self.limit
