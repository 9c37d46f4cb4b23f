"""The coverage-guided fuzzers run, a few seconds each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="atheris is not installed: it has no wheel for this Python or platform")


@pytest.mark.slow
def test_targets_of_each_kind_run() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", "1", "bodies", "pages", "host", "weights"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
