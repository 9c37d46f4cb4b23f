"""Prompt lookup: when the last tokens occurred before in the sequence, what followed them then is the draft.

Saxena 2023, "Prompt lookup decoding". The longest match counts; of equally long ones the most recent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.drafter.sessions import Session
from services.drafter.sources.base import Wish

LONGEST = 32  # tokens; a longer match is not compared any further
CANDIDATES = 16  # most recent occurrences that are compared


@dataclass(slots=True)
class _Grams:
    """Ends of each run of `n` tokens among the first `known` of `tokens`."""

    tokens: list[int]
    known: int = 0
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def follow(self, length: int, n: int) -> None:
        """Index the first `length` tokens."""
        for end in range(max(self.known + 1, n), length + 1):
            self.ends.setdefault(tuple(self.tokens[end - n : end]), []).append(end)
        self.known = max(self.known, length)


class Lookup:
    name = "lookup"

    def __init__(self, min_match: int) -> None:
        self._n = min_match
        self._grams: dict[Session, _Grams] = {}

    def draft(self, wishes: Sequence[Wish]) -> list[list[int]]:
        return [self._one(w) for w in wishes]

    def end(self, session: Session) -> None:
        self._grams.pop(session, None)

    def _one(self, wish: Wish) -> list[int]:
        tokens, length = wish.tokens, wish.length
        if length <= self._n:
            return []
        grams = self._grams.get(wish.session)
        if grams is None or grams.tokens is not tokens:
            grams = self._grams[wish.session] = _Grams(tokens)
        grams.follow(length, self._n)
        ends = grams.ends.get(tuple(tokens[length - self._n : length]), [])[-CANDIDATES - 1 :]
        earlier = [e for e in ends if e < length]
        if not earlier:
            return []
        best = max(earlier, key=lambda end: (_common_suffix(tokens, end, length), end))
        # A match that overlaps its own continuation is a loop; repeat it as often as drafts are wanted.
        period = length - best
        return [tokens[best + i % period] for i in range(wish.k)]


def _common_suffix(tokens: Sequence[int], end: int, length: int) -> int:
    """How many tokens before `end` equal those before `length`."""
    common = 0
    while common < min(end, LONGEST) and tokens[end - 1 - common] == tokens[length - 1 - common]:
        common += 1
    return common
