"""When a worker that died is started again. No I/O, no clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from shared.worker import EXIT_CONFIG


@dataclass
class RestartPolicy:
    """Exponential back-off with jitter for one worker; all times in seconds.

    The n-th death in a row delays the restart by `base` x 2^(n-1), at most `cap`, times a random factor between 1/2
    and 1, so that workers that died together do not come back together. A life of `healthy_after` or longer starts
    the count again. After `give_up_after` deaths in a row with `EXIT_CONFIG` it gives up, however long each life was: a
    worker may refuse only after it has loaded a large model.
    """

    base: float = 0.5
    cap: float = 30.0
    healthy_after: float = 10.0
    give_up_after: int = 3
    rng: random.Random = field(default_factory=random.Random)
    deaths: int = field(default=0, init=False)
    refusals: int = field(default=0, init=False)

    def died(self, lived: float, exit_code: int) -> float | None:
        """Seconds until the next start; None to give up."""
        if lived >= self.healthy_after:
            self.deaths = 0
        self.deaths += 1
        self.refusals = self.refusals + 1 if exit_code == EXIT_CONFIG else 0
        if self.refusals >= self.give_up_after:
            return None
        delay = min(self.cap, self.base * 2.0 ** min(self.deaths - 1, 32))
        return delay * self.rng.uniform(0.5, 1.0)
