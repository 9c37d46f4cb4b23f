"""Numbers by the second, of the last so many seconds. Pure: time is passed in, in seconds of a monotonic clock."""

from __future__ import annotations

from collections import Counter

Number = int | float


class Series:
    """Sums of what was added in each second, by name, and the last value that was put there."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._by_second: dict[int, Counter[str]] = {}
        self._began: int | None = None

    def add(self, name: str, amount: Number, now: float) -> None:
        self._at(now)[name] += amount  # type: ignore[assignment]  # typeshed's Counter counts in integers

    def put(self, name: str, value: Number, now: float) -> None:
        self._at(now)[name] = value  # type: ignore[assignment]

    def has(self, now: float) -> bool:
        """Whether anything is known of this second yet."""
        return int(now) in self._by_second

    def total(self, name: str, seconds: int, now: float) -> Number:
        """Of this second and those before it, `seconds` in all."""
        last = int(now)
        return sum(self._by_second[s][name] for s in range(last - seconds + 1, last + 1) if s in self._by_second)

    def rate(self, name: str, seconds: int, now: float) -> float:
        """A second, over the last `seconds`, or since the beginning if that is later."""
        if self._began is None:
            return 0.0
        over = min(seconds, max(int(now) - self._began, 1))
        return self.total(name, seconds, now) / over

    def values(self, name: str, now: float) -> list[Number | None]:
        """Second by second, the oldest first, without this one, which is not over. None: nothing is known of it."""
        last = int(now)
        found = (self._by_second.get(s) for s in range(last - self._seconds, last))
        return [None if second is None else second.get(name) for second in found]

    def _at(self, now: float) -> Counter[str]:
        second = int(now)
        if second not in self._by_second:
            self._by_second[second] = Counter()
            self._began = second if self._began is None else self._began
            for old in [s for s in self._by_second if s < second - self._seconds]:
                del self._by_second[old]
        return self._by_second[second]
