"""What a drafter knows of the sequences it drafts for. Pure: the time is passed in."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from services.drafter.record import Fit, Guess
from shared.messages import DraftItem

Key = tuple[str, str]  # decode worker, its session
Scope = tuple[str, str]  # tenant, salt: nothing is ever shared between two of these
OVERHEAD = 64  # tokens that a session counts for beyond its own: what is kept beside them
ADMITTED = 0.875  # share of the capacity that new sessions may fill; with the rest they grow
BUSY_S = 5.0  # a session asked about so lately does not go for the sake of another
IDLE_S = 60.0  # after that its asker is gone, or has no use for drafts


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
    asked_at: float = 0.0
    """On this worker's monotonic clock."""

    @property
    def scope(self) -> Scope:
        """Decode names its sessions `<tenant>/<request>`; a name without a tenant shares with nobody."""
        return self.key[1].partition("/")[0], self.salt

    @property
    def size(self) -> int:
        return OVERHEAD + len(self.tokens)

    def is_of(self, item: DraftItem) -> bool:
        """False if that is about another sequence, which has the name of this one by now."""
        return self.salt == item.salt and item.prompt_len in (0, self.prompt_len)


class SessionTable:
    """Sessions of `capacity` tokens in all, `OVERHEAD` for each included: that bounds their number and their memory.

    When there is no room, those go that nobody has asked about for `BUSY_S`. Where that is not enough, a new one is not
    taken in: it would cost one as much in use its place, which would come back and cost the next one its place. Its
    asker does without drafts, and tries again now and then. One that grows into others' room goes itself.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._size = 0
        self._sessions: OrderedDict[Key, Session] = OrderedDict()  # least recently asked about first
        self._ended: list[Session] = []

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def size(self) -> int:
        return self._size

    def update(self, worker: str, item: DraftItem, now: float) -> Session | None:
        """The session with the item's tokens after its first `base` ones. None if it does not have so many, or if there
        is no room for it."""
        key, length = (worker, item.session), item.base + len(item.token_ids)
        session = self._sessions.get(key)
        if session is not None and not session.is_of(item):
            self.end(key)
            session = None
        if session is None:
            if item.base or not self._make_room(OVERHEAD + length, self._capacity * ADMITTED, now):
                return None
            session = self._sessions[key] = Session(key, prompt_len=item.prompt_len or length, salt=item.salt)
            self._size += session.size
        if item.base > len(session.tokens):
            return None
        session.asked_at = now
        self._sessions.move_to_end(key)
        if not self._make_room(length - len(session.tokens), self._capacity, now):
            self.end(key)
            return None
        self._size -= session.size
        _tell(session, item.base, item.token_ids)
        self._size += session.size
        return session

    def end(self, key: Key) -> None:
        if (session := self._sessions.pop(key, None)) is not None:
            self._size -= session.size
            self._ended.append(session)

    def expire(self, now: float) -> None:
        """End those that nobody has asked about for `IDLE_S`."""
        for session in self._silent(now - IDLE_S):
            self.end(session.key)

    def take_ended(self) -> list[Session]:
        """Those that have ended since this was last asked."""
        ended, self._ended = self._ended, []
        return ended

    def _make_room(self, tokens: int, capacity: float, now: float) -> bool:
        """Whether so many more fit. Nobody goes in vain."""
        excess = self._size + tokens - capacity
        if excess <= 0:
            return True
        silent = self._silent(now - BUSY_S)
        if sum(session.size for session in silent) < excess:
            return False
        for session in silent:
            if excess <= 0:
                break
            excess -= session.size
            self.end(session.key)
        return True

    def _silent(self, since: float) -> list[Session]:
        return list(takewhile(lambda session: session.asked_at < since, self._sessions.values()))


def _tell(session: Session, base: int, told: Sequence[int]) -> None:
    known = session.tokens[base:]
    if known == list(told[: len(known)]):
        session.tokens.extend(told[len(known) :])
    else:
        session.tokens = [*session.tokens[:base], *told]
