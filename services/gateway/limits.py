"""How much one API key may ask for. Time is passed in: no clock here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from services.gateway.problems import Problem


class TokenBucket:
    """Lets `rate` things pass in a second on average, and up to `burst` at once."""

    def __init__(self, rate: float, burst: int, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = float(burst)
        self._at = now

    def take(self, count: int, now: float) -> float:
        """0 if they may pass now, else the seconds until they may. What is more than a burst passes when it is full."""
        self._level = min(self._burst, self._level + max(now - self._at, 0.0) * self._rate)
        self._at = max(now, self._at)
        needed = min(count, self._burst)
        if self._level < needed:
            return (needed - self._level) / self._rate
        self._level -= count
        return 0.0


class Admission:
    """Answers in progress, and begun, by API key."""

    def __init__(self, concurrency: int, rate: float, burst: int) -> None:
        self._concurrency = concurrency
        self._rate = rate
        self._burst = burst
        self._running: Counter[str] = Counter()
        self._buckets: dict[str, TokenBucket] = {}

    @property
    def running(self) -> int:
        return self._running.total()

    def enter(self, key: str, answers: int, now: float) -> Callable[[], None]:
        """Returns what to call, once, when they have ended. Raises a 429 that says when to come again."""
        if (running := self._running[key]) + answers > self._concurrency:
            told = f"{running} answers are being waited for with this API key; at most {self._concurrency} at once"
            raise Problem(429, told, "concurrency_limit_exceeded", retry_after=1)
        if self._rate:
            bucket = self._buckets.setdefault(key, TokenBucket(self._rate, self._burst, now))
            if wait := bucket.take(answers, now):
                told = f"more than {self._rate:g} answers a second with this API key; try again in {wait:.1f} s"
                raise Problem(429, told, "rate_limit_exceeded", retry_after=math.ceil(wait))
        self._running[key] += answers

        def leave() -> None:
            self._running[key] -= answers

        return leave
