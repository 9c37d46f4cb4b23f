"""What a drafter knows of the sequences it drafts for. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[str, str]  # decode worker, its session


@dataclass(slots=True, eq=False)
class Session:
    """One sequence's tokens as the decode worker told them: always its true tokens, never drafts."""

    key: Key
    tokens: list[int] = field(default_factory=list)
    guessed: tuple[int, tuple[int, ...], str] = (0, (), "")
    """Last answer: position, tokens, source; compared with what came of it when the next tokens are told."""


class SessionTable:
    """At most `limit` sessions; the least recently asked about go first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: OrderedDict[Key, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def update(self, key: Key, base: int, token_ids: Sequence[int]) -> Session | None:
        """The session with `token_ids` after its first `base` tokens; None if it does not have so many."""
        session = self._sessions.get(key)
        if session is None and base == 0:
            session = self._sessions[key] = Session(key)
        if session is None or base > len(session.tokens):
            return None
        del session.tokens[base:]
        session.tokens.extend(token_ids)
        self._sessions.move_to_end(key)
        return session

    def end(self, key: Key) -> Session | None:
        return self._sessions.pop(key, None)

    def overflow(self) -> list[Session]:
        """Remove and return the sessions beyond the limit."""
        return [self._sessions.popitem(last=False)[1] for _ in range(len(self._sessions) - self._limit)]
