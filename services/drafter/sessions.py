"""What a drafter knows of the sequences it drafts for. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[str, str]  # decode worker, its session
MAX_TOKENS = 1 << 17  # of one session: bounds what an asker can make a drafter hold


@dataclass(slots=True, eq=False)
class Session:
    """One sequence's tokens as the decode worker told them: always its true tokens, never drafts."""

    key: Key
    tokens: list[int] = field(default_factory=list)
    """Only appended to. When tokens change or go away this is another list: what a source holds stays as it was."""
    guessed: tuple[int, tuple[int, ...], str] = (0, (), "")
    """Last answer: position, tokens, source; compared with what came of it when the next tokens are told."""
    ended: bool = False


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
        told_before = session.tokens[base:]
        if told_before == list(token_ids[: len(told_before)]):
            session.tokens.extend(token_ids[len(told_before) :])
        else:
            session.tokens = [*session.tokens[:base], *token_ids]
        self._sessions.move_to_end(key)
        return session

    def end(self, key: Key) -> Session | None:
        session = self._sessions.pop(key, None)
        if session is not None:
            session.ended = True
        return session

    def overflow(self) -> list[Session]:
        """Remove and return the sessions beyond the limit."""
        beyond = list(self._sessions.values())[: max(len(self._sessions) - self._limit, 0)]
        for session in beyond:
            self.end(session.key)
        return beyond
