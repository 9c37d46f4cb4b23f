"""What time it is on the server, without trusting this machine's wall clock. No I/O, no clock."""

from __future__ import annotations

from datetime import datetime

PROMPT_S = 1.0
"""An answer that took longer tells the time badly; it counts only while nothing better is known."""


class ServerClock:
    """Told by answers of JetStream's API, which carry the server's time (`ts`); between them this machine's monotonic
    clock counts on, so a wall clock that is wrong, or is set, makes no message look old.
    """

    def __init__(self) -> None:
        self._ahead: float | None = None  # of the monotonic clock

    def hear(self, ts: object, asked: float, now: float) -> None:
        """`ts` is RFC 3339, anything else is passed over; `asked` and `now` are monotonic seconds."""
        if not isinstance(ts, str) or (now - asked > PROMPT_S and self._ahead is not None):
            return
        try:
            self._ahead = datetime.fromisoformat(ts).timestamp() - now
        except (ValueError, OverflowError, OSError):
            return

    def age(self, stamp: float, now: float, wall: float) -> float:
        """Seconds since the server's time `stamp`, never negative. `wall` counts until the server has told its time."""
        return max(0.0, (wall if self._ahead is None else now + self._ahead) - stamp)
