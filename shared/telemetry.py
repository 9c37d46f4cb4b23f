"""Logs: structlog, JSON for machines, human-readable on a terminal. Lines carry role and worker, and the request id."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TextIO, TypeVar, cast

import structlog

T = TypeVar("T")

Counters = Counter[str]
"""Monotonic event counts of one worker, published in its beat."""


def counted(counters: Mapping[str, int], prefix: str) -> int:
    """The sum of those whose names begin so."""
    return sum(count for name, count in counters.items() if name.startswith(prefix))


def rarely(count: int) -> bool:
    """True for 1, 2, 4, 8 …: says often enough what anybody could make happen all the time."""
    return count & (count - 1) == 0


STEP_MS = (5, 10, 25, 50, 100, 250, 500, 1000, 2500)
"""Upper bounds of the buckets that steps are counted in; the last bucket has none."""


class Spent:
    """How long the blocking calls of one thread took, together and each; other threads may read it."""

    def __init__(self) -> None:
        self._ns = 0
        self._buckets = [0] * (len(STEP_MS) + 1)

    def run(self, function: Callable[..., T], *args: object) -> T:
        started = time.perf_counter_ns()
        try:
            return function(*args)
        finally:
            self.add(time.perf_counter_ns() - started)

    def add(self, ns: int) -> None:
        """A call that was timed elsewhere, by the same thread as all others."""
        self._ns += ns
        self._buckets[bisect_left(STEP_MS, ns / 1e6)] += 1

    @property
    def ms(self) -> int:
        """For a counter: the sum, not its parts, is rounded down."""
        return self._ns // 1_000_000

    @property
    def counts(self) -> dict[str, int]:
        """For a beat: `step_ms`, and by bucket those that took so long, as `step_le_25` (`step_le_inf`)."""
        bounds = (*map(str, STEP_MS), "inf")
        buckets = {f"step_le_{bound}": n for bound, n in zip(bounds, self._buckets, strict=True) if n}
        return {"step_ms": self.ms, **buckets}


class _Stderr:
    """Whatever sys.stderr is at the moment. A line that it does not take (closed, disk full) is lost: the reader of a
    connection logs too, and must not end by it."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()


_STDERR = cast(TextIO, _Stderr())


def to_stderr() -> None:
    """For programs that only use the client and have not set up structlog: warnings, and not on their stdout."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(_STDERR),
        )


def configure(level: str = "info", format: str = "auto", **bound: str) -> None:
    """Set up logging for this process. `bound` (role, worker) goes on every line."""
    human = format == "console" or (format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if human
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if human else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(_STDERR),
    )
    structlog.contextvars.bind_contextvars(**bound)
