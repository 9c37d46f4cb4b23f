"""What a drafter knows of the sequences it drafts for. Pure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.drafter.record import Fit, Guess
from shared.messages import DraftItem

Key = tuple[str, str]  # decode worker, its session
Scope = tuple[str, str]  # tenant, salt: nothing is ever shared between two of these
MAX_TOKENS = 1 << 17  # of one session: bounds what an asker can make a drafter hold


@dataclass(slots=True, eq=False)
class Session:
    """One sequence's tokens as the decode worker told them: always its true tokens, never drafts."""

    key: Key
    tokens: list[int] = field(default_factory=list)
    """Only appended to. When tokens change or go away this is another list: what a source holds stays as it was."""
    prompt_len: int = 0
    salt: str = ""
    guess: Guess | None = None
    """The last answer, until the next tokens tell what came of it."""
    fits: defaultdict[str, Fit] = field(default_factory=lambda: defaultdict(Fit))
    """By source."""
    ended: bool = False

    @property
    def scope(self) -> Scope:
        """Decode names its sessions `<tenant>/<request>`; a name without a tenant shares with nobody."""
        return self.key[1].partition("/")[0], self.salt


class SessionTable:
    """At most `limit` sessions; the least recently asked about go first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: OrderedDict[Key, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def update(self, worker: str, item: DraftItem) -> Session | None:
        """The session with the item's tokens after its first `base` tokens; None if it does not have so many."""
        key, base, told = (worker, item.session), item.base, item.token_ids
        session = self._sessions.get(key)
        if session is not None and session.salt != item.salt:
            return None
        if session is None and base == 0:
            session = Session(key, prompt_len=item.prompt_len or len(told), salt=item.salt)
            self._sessions[key] = session
        if session is None or base > len(session.tokens):
            return None
        _tell(session, base, told)
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


def _tell(session: Session, base: int, told: Sequence[int]) -> None:
    known = session.tokens[base:]
    if known == list(told[: len(known)]):
        session.tokens.extend(told[len(known) :])
    else:
        session.tokens = [*session.tokens[:base], *told]
