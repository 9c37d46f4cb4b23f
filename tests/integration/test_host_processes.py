"""Processes that share blocks through memory: whoever dies or freezes, wherever, nobody reads a wrong byte."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else tmp_path) as parent:
        yield Path(parent) / "blocks"


def run(mode: str, folder: Path, seed: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.host_rig", mode, str(folder), str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stderr, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_workers_killed_at_random(folder):
    found = run("stress", folder, seed=1)
    assert set(found["codes"]) <= {"0", str(-signal.SIGKILL)}, found["codes"]
    counters = found["counters"]
    assert min(counters.get(name, 0) for name in ("hit", "exists", "evicted")) > 0
    assert "reject" not in counters, "no death leaves a damaged block"
    assert not found["left"], "the last one out removes the folder"


@pytest.mark.parametrize("mode", ["killed-survivor", "killed-successor", "frozen-survivor", "frozen-successor"])
def test_a_worker_stopped_at_any_call(folder, mode):
    found = run(mode, folder)
    assert found["calls"] > 30, "the life that is cut short got as far as that"
    assert found["problems"] == []


def test_coming_and_going_at_once(folder):
    found = run("churn", folder)
    assert found == {"codes": {"0": 4}, "left": False}
