"""The GPU check can be relied on to run through: on a real GPU there is one try."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu.report import Check, Line, Report, give_up, run


def good() -> Iterator[Line]:
    yield Line("size", 12.0, "GB")
    yield Line("error", 0.001234, ok=True)


def broken() -> Iterator[Line]:
    yield Line("before", 1.0, ok=True)
    raise RuntimeError("out of memory\nand more")


def ran(checks: list[Check], budget_s: float) -> Report:
    report = Report()
    run(report, checks, budget_s, lambda _: None)
    return report


def test_one_check_that_fails_does_not_end_the_others() -> None:
    report = ran([Check("a", broken, 1), Check("b", good, 1)], 60)
    assert [(name, line.case) for name, line in report.lines] == [("a", "before"), ("b", "size"), ("b", "error")]
    assert report.failed == {"a": "RuntimeError: out of memory"} and not report.ok
    table = report.table().splitlines()
    assert table[0].split() == ["check", "case", "result", "unit"]
    assert table[-1].split() == ["a", "FAILED", "RuntimeError:", "out", "of", "memory"]
    assert "0.00123" in report.table() and "12  GB" in report.table()


def test_what_there_is_no_time_for_is_named() -> None:
    report = ran([Check("long", good, 100), Check("short", good, 1)], 50)
    assert report.skipped == ["long"] and {name for name, _ in report.lines} == {"short"} and report.ok
    assert "no time left" in report.table()
    assert json.loads(report.json(device="x"))["skipped"] == ["long"]


def test_a_wrong_result_fails_the_run() -> None:
    assert not ran([Check("a", lambda: iter([Line("error", 1.0, ok=False)]), 1)], 60).ok


def test_a_check_that_hangs_does_not_cost_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    report, codes, tables = Report(), [0], [""]
    monkeypatch.setattr(os, "_exit", codes.append)

    def hang() -> Iterator[Line]:
        yield from good()
        give_up(report, lambda: tables.append(report.table()))

    run(report, [Check("slow", hang, 1)], 60, lambda _: None)
    assert "still running when time was up" in tables[-1] and "size" in tables[-1] and codes == [0, 1]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_check_runs_through_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--dry-run", "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=390, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["ok"] and not result["failed"] and not result["skipped"]
    assert len({line["check"] for line in result["lines"]}) == 21
    assert all(line["ok"] is not False for line in result["lines"])
