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
    """Ends of each run of `n` tokens, for the tokens indexed so far."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def follow(self, tokens: Sequence[int], n: int) -> None:
        """Index `tokens`, of which those indexed before are a prefix; anything else is indexed anew."""
        known = len(self.tokens)
        if known > len(tokens) or self.tokens[-n:] != list(tokens[max(known - n, 0) : known]):
            self.tokens, self.ends, known = [], {}, 0
        self.tokens.extend(tokens[known:])
        for end in range(max(known, n), len(tokens) + 1):
            if end > known:
                self.ends.setdefault(tuple(tokens[end - n : end]), []).append(end)


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
        tokens = wish.tokens
        if len(tokens) <= self._n:
            return []
        grams = self._grams.setdefault(wish.session, _Grams())
        grams.follow(tokens, self._n)
        ends = [e for e in grams.ends.get(tuple(tokens[-self._n :]), [])[-CANDIDATES - 1 :] if e < len(tokens)]
        if not ends:
            return []
        best = max(ends, key=lambda end: (_common_suffix(tokens, end), end))
        # A match that overlaps its own continuation is a loop; repeat it as often as drafts are wanted.
        period = len(tokens) - best
        return [tokens[best + i % period] for i in range(wish.k)]


def _common_suffix(tokens: Sequence[int], end: int) -> int:
    """How many tokens before `end` equal the last ones."""
    length = 0
    while length < min(end, LONGEST) and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
