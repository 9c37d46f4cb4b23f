"""Which requests were cancelled, for those that have not arrived here yet. Time is passed in."""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 4096
SLACK_S = 0.5  # clocks of server and worker agree about so well


class Cancels:
    """The latest cancels by `request_key`. An id may be used again: a cancel counts for what was queued before it."""

    def __init__(self) -> None:
        self._at: OrderedDict[str, float] = OrderedDict()

    def note(self, key: str, now: float) -> None:
        self._at[key] = now
        self._at.move_to_end(key)
        while len(self._at) > REMEMBERED:
            self._at.popitem(last=False)

    def covers(self, key: str, queued_at: float) -> bool:
        """Whether what was queued at `queued_at` (in the time of `note`) has been cancelled since."""
        cancelled_at = self._at.get(key)
        return cancelled_at is not None and cancelled_at + SLACK_S >= queued_at
