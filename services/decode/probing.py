"""What asking drafters on suspicion may cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass

PROBE_DEPTH = 4
PROBE_SHARE = 0.015
"""Of the time of steps, so much may drafters spend on asks that nobody waits for: they may share the cores."""
FREE_PROBES = 3  # the first ones of a drafter: it must show itself
MAX_DEBT = 5.0  # steps' time that such asks may have cost beyond their share: no longer break than 250 steps


@dataclass(slots=True)
class ProbeBudget:
    _credit: float = 0.0

    @property
    def spent(self) -> bool:
        """Asks have cost more than their share."""
        return self._credit < 0

    def step(self, seconds: float) -> None:
        """A step took so long."""
        self._credit = min(max(self._credit, -MAX_DEBT * seconds) + PROBE_SHARE * seconds, 0.0)

    def spend(self, seconds: float) -> None:
        """A drafter was at it for so long."""
        self._credit -= seconds
