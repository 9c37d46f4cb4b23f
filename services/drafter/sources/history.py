"""Past outputs, each scope's apart from all others'. The oldest tokens leave, first those of whoever has the most."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from services.drafter.sessions import Scope
from services.drafter.sources.suffix_index import LONGEST, Match, SuffixIndex

MAX_SCOPES = 256
PORTION = 64  # tokens that leave at a time: so the largest scopes become equally large


class History:
    """At most `capacity` tokens over all scopes, what waits to be taken in not counted: that is at most as much again.

    Of more than `MAX_SCOPES` the one whose last output is the oldest is forgotten as a whole.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._indexes: OrderedDict[Scope, SuffixIndex] = OrderedDict()
        self._tokens = 0
        self._waiting: deque[tuple[Scope, deque[int]]] = deque()
        self._waiting_tokens = 0

    def __len__(self) -> int:
        return self._tokens

    @property
    def waiting(self) -> int:
        """Tokens still to be taken in."""
        return self._waiting_tokens

    def add(self, scope: Scope, tokens: Sequence[int]) -> None:
        """An output to be taken in by `work`. Of one that is too long the end is kept."""
        tokens = tokens[-(self._capacity - 1) :] if self._capacity > LONGEST else ()
        if len(tokens) < LONGEST:
            return
        self._waiting.append((scope, deque(tokens)))
        self._waiting_tokens += len(tokens)
        while self._waiting_tokens > self._capacity:
            self._waiting_tokens -= len(self._waiting.popleft()[1])

    def work(self, most: int) -> None:
        """Take in up to `most` tokens."""
        if not self._waiting:
            return
        scope, tokens = self._waiting[0]
        index = self._indexes.setdefault(scope, SuffixIndex([]))
        before = len(index.tokens)
        index.tokens.extend(tokens.popleft() for _ in range(min(most, len(tokens))))
        index.follow(len(index.tokens))
        self._waiting_tokens -= len(index.tokens) - before
        if not tokens:
            index.part()
            self._waiting.popleft()
        self._tokens += len(index.tokens) - before
        self._indexes.move_to_end(scope)
        self._make_room()

    def matches(self, scope: Scope, recent: Sequence[int]) -> tuple[SuffixIndex, list[Match]] | None:
        index = self._indexes.get(scope)
        if index is None or not (found := index.matches(recent, index.known)):
            return None
        return index, found

    def _make_room(self) -> None:
        if len(self._indexes) > MAX_SCOPES:
            self._tokens -= self._indexes.popitem(last=False)[1].known
        while (excess := self._tokens - self._capacity) > 0:
            scope, index = max(self._indexes.items(), key=lambda item: item[1].known)
            gone = min(excess, index.known, PORTION)
            index.forget(gone)
            self._tokens -= gone
            if not index.tokens:
                del self._indexes[scope]
