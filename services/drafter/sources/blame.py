"""Which sessions a source cannot draft for, found out when a step of several fails. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.drafter.sessions import Session
from shared.engine.base import BadSpans


@dataclass(slots=True)
class Blame:
    suspects: set[Session] = field(default_factory=set)
    """They were in a step that failed. Each steps alone next: then it is known who is to blame."""
    barred: set[Session] = field(default_factory=set)
    """The source cannot bear them."""

    def turn(self, sessions: Sequence[Session]) -> Sequence[Session]:
        """Who of these steps now: a suspect alone, or all."""
        return [session for session in sessions if session in self.suspects][:1] or sessions

    def passed(self, sessions: Sequence[Session]) -> None:
        """Their step has succeeded."""
        self.suspects.difference_update(sessions)

    def failed(self, sessions: Sequence[Session], error: Exception) -> list[Session]:
        """Their step has failed; those to blame, who are barred now. Where they are not known, each tries it alone."""
        if not isinstance(error, BadSpans) and len(sessions) > 1:
            self.suspects.update(sessions)
            return []
        bad = [sessions[index] for index in (error.spans if isinstance(error, BadSpans) else (0,))]
        self.suspects.difference_update(bad)
        self.barred.update(bad)
        return bad

    def ended(self, session: Session) -> None:
        self.suspects.discard(session)
        self.barred.discard(session)
