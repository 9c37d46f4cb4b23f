"""Where drafts come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.drafter.sessions import Session
from shared.messages import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """Up to `k` tokens that may follow the first `length` (at least 1) of `tokens`.

    `tokens` is the session's list at the time of asking. Such a list only grows, so nobody needs a copy of it.
    """

    session: Session
    tokens: list[int]
    length: int
    k: int
    sampling: Sampling
    budget_s: float
    """Drafts that take longer come too late."""


class DraftSource(Protocol):
    """Answers wishes in a batch, one per session; one call at a time."""

    name: str

    def draft(self, wishes: Sequence[Wish]) -> list[list[int]]:
        """For each wish its drafts in order of position; an empty list if there are none."""
        ...

    def end(self, session: Session) -> None:
        """The session is over or what is held of it is in doubt: free it."""
        ...


class SlowSource(DraftSource, Protocol):
    """A source whose `draft` blocks for a while: it is called in the worker's engine thread."""

    def expected_s(self, wish: Wish) -> float:
        """Seconds until a first draft for this wish. Not called while `draft` runs."""
        ...
