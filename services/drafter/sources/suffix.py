"""What followed the last tokens when they occurred before, in this sequence or in past outputs of the same scope.

Saxena 2023, "Prompt lookup decoding"; Oliaro et al. 2024, "SuffixDecoding". It answers at once, on the event loop, so
it does little at a time: long texts are taken in by `work`, a piece per call, and found as far as they have been.
"""

from __future__ import annotations

from collections import OrderedDict

from services.drafter.record import Record
from services.drafter.sessions import Session
from services.drafter.sources.base import Wish
from services.drafter.sources.continuation import KINDS, PRIORS, Continuation, Text, continuation
from services.drafter.sources.history import History
from services.drafter.sources.suffix_index import LONGEST, SuffixIndex

PIECE = 512  # tokens taken in by `work` at a time: well under a millisecond
AT_ONCE = 128  # taken in for a draft; with more the draft is from what has been taken in
INDEXED_TOKENS = 1 << 19  # of all sessions together, at about 250 bytes each


class SuffixSource:
    name = "suffix"

    def __init__(self, history_tokens: int) -> None:
        """`history_tokens` of past outputs are kept, over all scopes; 0: none."""
        self.record = Record((*PRIORS, *PRIORS))
        self._history = History(history_tokens)
        self._indexes: OrderedDict[Session, SuffixIndex] = OrderedDict()  # least recently drafted for first
        self._indexed = 0
        self._behind: dict[Session, int] = {}  # and up to where its index has to go

    @property
    def behind(self) -> bool:
        """There is something for `work` to do."""
        return bool(self._behind or self._history.waiting)

    def draft(self, wish: Wish) -> Continuation:
        """The best continuation, an empty one if nothing is likely enough."""
        own = self._followed(wish)
        recent = wish.tokens[max(wish.length - LONGEST, 0) : wish.length]
        chance, fit = self.record.chance, wish.session.fits[self.name]
        text = Text(wish.tokens, wish.length, loops=True)
        best = continuation(
            text, own.matches(recent, wish.length), wish.most, lambda kind: chance(kind, fit), wish.least
        )
        if (past := self._history.matches(wish.session.scope, recent)) is not None:
            text = Text(past[0].tokens, past[0].known, loops=False)
            other = continuation(text, past[1], wish.most, lambda kind: chance(KINDS + kind, fit), wish.least)
            if other.expected > best.expected:
                kinds = tuple(KINDS + kind for kind in other.kinds)
                return Continuation(other.token_ids, kinds, other.expected)
        return best

    def end(self, session: Session) -> None:
        """The session is over: what it generated, with a little of what stood before, is a past output now."""
        self._drop(session)
        self._history.add(session.scope, session.tokens[max(session.prompt_len - LONGEST, 0) :])

    def work(self) -> None:
        """Take in a piece of what is still to be taken in."""
        if not self._behind:
            self._history.work(PIECE)
            return
        session, length = self._behind.popitem()
        self._take_in(session, self._indexes[session], length, PIECE)

    def _followed(self, wish: Wish) -> SuffixIndex:
        """The session's index, up to date unless much is new."""
        index = self._indexes.get(wish.session)
        if index is None or index.tokens is not wish.tokens:
            self._drop(wish.session)
            index = self._indexes[wish.session] = SuffixIndex(wish.tokens)
        self._indexes.move_to_end(wish.session)
        length = max(wish.length, self._behind.pop(wish.session, 0))
        self._take_in(wish.session, index, length, AT_ONCE if length - index.known <= AT_ONCE else 0)
        return index

    def _take_in(self, session: Session, index: SuffixIndex, length: int, most: int) -> None:
        before = index.known
        index.follow(min(length, before + most))
        self._indexed += index.known - before
        if index.known < length:
            self._behind[session] = length
        while self._indexed > INDEXED_TOKENS and len(self._indexes) > 1:
            self._drop(next(iter(self._indexes)))

    def _drop(self, session: Session) -> None:
        self._behind.pop(session, None)
        if (index := self._indexes.pop(session, None)) is not None:
            self._indexed -= index.known
