"""A fake engine that takes its whole process with it, as a fault in a kernel or a lack of memory does."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from shared.engine.span import Span
from tests.wide_engine import WideEngine


class CrashEngine(WideEngine):
    """As `WideEngine`; a step that computes the token `crash_on` kills the process."""

    def __init__(self, *, crash_on: int | None = None, width: int = 1, **options: Any) -> None:
        super().__init__(width=width, **options)
        self._crash_on = crash_on

    def step(self, spans: Sequence[Span]) -> list[list[int]]:
        if any(self._crash_on in span.token_ids for span in spans):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(spans)
