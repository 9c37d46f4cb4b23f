"""Which request queue is pulled next. Pure: no I/O, no clock.

The highest queue that is not empty goes first, but not for ever: of requests taken past somebody who waits, only so
many come from higher queues in a row.
"""

from __future__ import annotations

from collections.abc import Sequence

SHARE = 8
"""Requests taken past a lower queue before it has a turn: with all full, 8 of 10 are high, 1 is normal, 1 is low."""


class Turns:
    """For one pull loop per priority (highest first): each asks `may_pull` and then says what came of its pull.

    A queue is dry while a pull waits for its next message: nobody waits there.
    """

    def __init__(self, priorities: Sequence[str], share: int = SHARE) -> None:
        self._order = tuple(priorities)
        self._share = share
        self._passed = dict.fromkeys(self._order, 0)
        self._asking: set[str] = set()
        self._dry: set[str] = set()
        self._turn: str | None = None  # a late queue that is being pulled: the others wait for the outcome

    def may_pull(self, priority: str) -> bool:
        """Whether it is this queue's turn. Who is told no asks again soon."""
        self._asking.add(priority)
        late = self._late()
        if self._turn is None and late == priority:
            self._turn = priority
        elif self._turn or late or not self._dry.issuperset(self._order[: self._order.index(priority)]):
            return False
        self._asking.discard(priority)
        return True

    def _late(self) -> str | None:
        """The queue that was passed over too often. One whose loop is busy with a request does not ask."""
        late = [p for p in self._order if p in self._asking and self._passed[p] >= self._share]
        return max(late, key=lambda p: self._passed[p], default=None)

    def dry(self, priority: str) -> None:
        """It is empty; a pull waits for its next message."""
        self._dry.add(priority)
        self._passed[priority] = 0
        self._end_turn(priority)

    def over(self, priority: str, taken: int) -> None:
        """A pull has ended, with `taken` requests or none."""
        self._dry.discard(priority)
        self._end_turn(priority)
        if taken:
            self._passed[priority] = 0
            for lower in self._order[self._order.index(priority) + 1 :]:
                self._passed[lower] += taken

    def handed_back(self, priority: str) -> None:
        """There was no room after all for what came: its next turn is at once."""
        self._passed[priority] = self._share

    def _end_turn(self, priority: str) -> None:
        if self._turn == priority:
            self._turn = None
