"""Checks that run one after the other within a budget of time, and one table of what they found. No torch."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Line:
    """One result. `ok` is None where there is nothing to judge."""

    case: str
    value: float | str
    unit: str = ""
    note: str = ""
    ok: bool | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """`run` yields lines as it goes, so that what it found before it failed is not lost. `seconds`: what it takes."""

    name: str
    run: Callable[[], Iterator[Line]]
    seconds: float


@dataclass
class Report:
    lines: list[tuple[str, Line]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Check → its error."""
    skipped: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    running: str = ""

    @property
    def ok(self) -> bool:
        return not self.failed and all(line.ok is not False for _, line in self.lines)

    def table(self) -> str:
        rows = [("check", "case", "result", "unit", "")]
        for check, line in self.lines:
            verdict = {None: "", True: "ok", False: "FAILED"}[line.ok]
            note = " ".join(part for part in (verdict, line.note) if part)
            rows.append((check, line.case, _number(line.value), line.unit, note))
        rows += [(check, "", "FAILED", "", error) for check, error in self.failed.items()]
        rows += [(check, "", "skipped", "", "no time left") for check in self.skipped]
        a, b, c, d = (max(len(row[i]) for row in rows) for i in range(4))
        return "\n".join(f"{r[0]:{a}}  {r[1]:{b}}  {r[2]:>{c}}  {r[3]:{d}}  {r[4]}".rstrip() for r in rows)

    def json(self, **more: object) -> str:
        lines = [{"check": check, **asdict(line)} for check, line in self.lines]
        rest = {"failed": self.failed, "skipped": self.skipped, "seconds": self.seconds}
        return json.dumps({**more, "ok": self.ok, "lines": lines, **rest}, indent=1)


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def run(report: Report, checks: Sequence[Check], budget_s: float, progress: Callable[[str], None]) -> None:
    """Run what there is time for. One that fails does not end the others."""
    end = time.monotonic() + budget_s
    for check in checks:
        began = time.monotonic()
        if began + check.seconds > end:
            report.skipped.append(check.name)
            continue
        report.running = check.name
        progress(f"{check.name} …")
        try:
            for line in check.run():
                report.lines.append((check.name, line))
        except Exception as error:  # whatever it is, the others are still worth running
            progress(traceback.format_exc())
            report.failed[check.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        report.seconds[check.name] = round(time.monotonic() - began, 1)
    report.running = ""


def give_up(report: Report, show: Callable[[], None]) -> None:
    """Time is up: show what is known and end the process, whatever it is waiting for."""
    report.failed[report.running] = "still running when time was up"
    show()
    os._exit(1)
