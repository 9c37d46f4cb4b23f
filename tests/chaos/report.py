"""What came of a run. No I/O, no clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tests.chaos.oracle import FATAL, Problem
from tests.chaos.plan import Fault

OUTCOMES = ("completed", "retried", "resumed", "cancelled", *FATAL)
MAX_SHOWN = 20


@dataclass
class Waiting:
    """A fault after which no request has shown yet that its role works."""

    fault: Fault
    since: float


@dataclass
class Report:
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    """Tries that ended with an error that says to ask again, by its code."""
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    """Each in a line: what must not happen, and what else went wrong."""
    attempts: Counter[int] = field(default_factory=Counter)
    """Answers by the number of workers that had them."""
    _waiting: list[Waiting] = field(default_factory=list)
    _blows: list[float] = field(default_factory=list)
    _recoveries: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def injected(self, fault: Fault, now: float) -> None:
        self.faults[fault.kind] += 1
        self._waiting.append(Waiting(fault, now))
        if fault.role == "decode":
            self._blows.append(now)

    def blows(self, since: float) -> int:
        """How many faults have hit decode workers, or all workers, since then."""
        return sum(blow >= since for blow in self._blows)

    def finished(self, roles: set[str], sent: float, now: float) -> None:
        """A request that `roles` served, sent and finished at these times, has ended well."""
        for waiting in list(self._waiting):
            if sent >= waiting.since and waiting.fault.role in roles:
                self._waiting.remove(waiting)
                self._recoveries[waiting.fault.kind].append(now - waiting.since)

    def ended(self, request: str, outcome: str, found: list[Problem]) -> None:
        """A request is done with: well, unless something was found."""
        self.outcomes[found[0].kind if found else outcome] += 1
        self.problems += [f"{problem.kind}: {request}: {problem.what}" for problem in found]

    @property
    def failed(self) -> bool:
        return bool(self.problems) or any(self.outcomes[kind] for kind in FATAL)

    def as_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "failed": self.failed,
            "faults": sum(self.faults.values()),
            "faults_by_kind": dict(sorted(self.faults.items())),
            "requests": sum(self.outcomes.values()),
            "outcomes": {outcome: self.outcomes[outcome] for outcome in OUTCOMES},
            "refusals": dict(self.refusals),
            "attempts": {str(attempts): count for attempts, count in sorted(self.attempts.items())},
            "recovery_s": {
                kind: {"median": round(median(times), 2), "max": round(max(times), 2)}
                for kind, times in sorted(self._recoveries.items())
            },
            "not_seen_to_recover": dict(Counter(waiting.fault.kind for waiting in self._waiting)),
            "problems": self.problems,
        }

    def text(self) -> str:
        facts = self.as_dict()
        lines = [f"seed {self.seed}: {facts['faults']} faults, {facts['requests']} requests"]
        lines += [f"  {outcome:<12}{facts['outcomes'][outcome]:>6}" for outcome in OUTCOMES]
        lines.append("  tries refused, to be asked again: " + (_counts(self.refusals) or "none"))
        lines.append("  answers by number of attempts: " + _counts(facts["attempts"]))
        lines.append(f"  {'fault':<20}{'times':>6}{'recovery, median':>18}{'max':>8}")
        for kind, count in facts["faults_by_kind"].items():
            times = facts["recovery_s"].get(kind)
            shown = f"{times['median']:>16.2f} s{times['max']:>6.2f} s" if times else ""
            lines.append(f"  {kind:<20}{count:>6}{shown}")
        lines += [f"PROBLEM {problem}" for problem in self.problems[:MAX_SHOWN]]
        lines.append("FAILED" if self.failed else "all answers are right")
        return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
