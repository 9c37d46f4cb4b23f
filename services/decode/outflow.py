"""How fast requests leave the queue, and when to ask again who found it full. Pure: no I/O, no clock.

A request is in the queue from its publish until it is acked: those that are being answered count. How many have left so
far is the last sequence that the queue gave less the requests that are there; the rate is how fast that number grows,
whoever served them.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
"""The rate is that of so many seconds past."""
LEAST_S = 0.5
"""It is not known before it has been looked at for so long."""
SOONEST_S, LATEST_S = 0.1, 60.0
UNKNOWN_S = 2.0
"""While the rate is not known, a full queue is taken to be worked off in so long."""


class Outflow:
    """`capacity`: requests that the queue holds. Times are in seconds of one monotonic clock.

    Whoever is told to wait is promised a place of those that come free, one after the other, so that not all of them
    come back at the same moment. A promise counts for as long as it takes to come true.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._looks: deque[tuple[float, int]] = deque()
        self._there = 0
        self._promised = 0.0
        self._promised_at = 0.0

    def look(self, now: float, last_seq: int, there: int) -> None:
        """The queue has `there` requests, and gave `last_seq` to the last that came."""
        left = last_seq - there
        if self._looks and left < self._looks[-1][1]:
            self._looks.clear()  # another queue: the server lost the first one
        self._looks.append((now, left))
        while now - self._looks[0][0] > WINDOW_S:
            self._looks.popleft()
        self._there = there

    @property
    def rate(self) -> float | None:
        """Requests per second that leave; None if not known. When none has left for long, what one would make of it."""
        since, before = self._looks[0] if self._looks else (0.0, 0)
        until, left = self._looks[-1] if self._looks else (0.0, 0)
        least = LEAST_S if left > before else UNKNOWN_S
        return max(left - before, 1) / (until - since) if until - since >= least else None

    def wait(self, now: float, askers: int = 1) -> float:
        """Seconds until there is room for one who asks now. `askers`: workers that tell and promise, as this one does;
        each has its share of the places.
        """
        share = (self.rate or self._capacity / UNKNOWN_S) / askers
        self._promised = max(self._promised - (now - self._promised_at) * share, 0.0)
        self._promised_at = now
        room = max(self._capacity - self._there, 0)
        wait = max(self._promised + 1 - room, 0.0) / share
        self._promised = min(self._promised + 1, float(self._capacity))
        return min(max(wait, SOONEST_S), LATEST_S)
