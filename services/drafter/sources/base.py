"""What is asked of a source of drafts, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

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
