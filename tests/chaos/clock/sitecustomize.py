"""Makes this process's wall clock wrong by as many seconds as the file $CHAOS_CLOCKS/$TRINE_WORKER says.

Python imports a module of this name at its start. Monotonic clocks stay right, as they do when a real clock is set.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

LOOK_S = 0.2
_real = time.time
_real_ns = time.time_ns


class _Error:
    """Of the clock, in seconds; the file is looked at now and then."""

    def __init__(self) -> None:
        self._seconds = self._look_at = 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            try:
                self._seconds = float((Path(os.environ["CHAOS_CLOCKS"]) / os.environ["TRINE_WORKER"]).read_text())
            except FileNotFoundError:
                self._seconds = 0.0
        return self._seconds


_error = _Error()


def _time() -> float:
    return _real() + _error()


def _time_ns() -> int:
    return _real_ns() + int(_error() * 1e9)


if "CHAOS_CLOCKS" in os.environ and "TRINE_WORKER" in os.environ:
    time.time, time.time_ns = _time, _time_ns
