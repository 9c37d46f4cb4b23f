"""Who may run beside whom while a request is suspected of killing workers. Pure: no I/O, no clock.

A worker's death tells nothing about which of the requests that it ran is to blame. So one that was at work in a worker
that died, without writing a token, gets its next try apart: beside it run only such as have shown, by a token of this
attempt, that a step can bear them. If that worker dies too, it is the suspect, not a bystander.
"""

from __future__ import annotations


class Trials:
    """Requests, by key, from coming in until their first token here: in the line first, if need be.

    At most one suspect at a time is past the line, and then nobody else is who has no token yet.
    """

    def __init__(self) -> None:
        self._line: dict[str, bool] = {}  # in order; True: a suspect
        self._tried: dict[str, bool] = {}

    @property
    def waiting(self) -> bool:
        """Somebody waits in the line: other workers may have room for those to come."""
        return bool(self._line)

    def enter(self, key: str, suspect: bool) -> None:
        self._line[key] = suspect

    def start(self) -> list[str]:
        """Those whose turn it is now, in order."""
        started: list[str] = []
        for key, suspect in list(self._line.items()):
            if self._tried and (suspect or any(self._tried.values())):
                break
            del self._line[key]
            self._tried[key] = suspect
            started.append(key)
        return started

    def leave(self, key: str) -> None:
        """It has a token, or has ended; may be called twice."""
        self._line.pop(key, None)
        self._tried.pop(key, None)
