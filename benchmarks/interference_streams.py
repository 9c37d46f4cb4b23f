"""Running streams while long prompts keep arriving: what is sent, and what the streams' readers saw."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.peers_runs import Failed, Texts
from trine.bench_http import HttpTarget
from trine.bench_sets import Prompt
from trine.bench_stats import Record, percentile

STREAMS = 4
STREAM_PROMPT = 64
BEGUN = 4
"""Pieces of each stream before anything is measured."""
BEGIN_S = 60.0
CALM_S = 180.0
PACE = 40
"""No stream here is faster, in tokens a second: it shall not end before the time is up."""


@dataclass(frozen=True, slots=True)
class Window:
    """What was seen between two moments of one clock."""

    began: float
    ended: float

    def gaps(self, pieces: Sequence[float]) -> list[float]:
        """Times between a stream's pieces, of those that came in here; and the one that goes on at the end, if it is
        the longest: a stream that stands still has no last piece, and is no better for it.
        """
        gaps = [later - earlier for earlier, later in pairwise(pieces) if self.began < later <= self.ended]
        before = [at for at in pieces if at <= self.ended]
        going_on = self.ended - before[-1] if before else self.ended - self.began
        return [*gaps, going_on] if going_on > max(gaps, default=0.0) else gaps

    def count(self, pieces: Sequence[float]) -> int:
        return sum(self.began < at <= self.ended for at in pieces)


async def interfered(target: HttpTarget, texts: Texts, every_s: float, seconds: float, size: int) -> dict[str, Any]:
    """One run: p99 between tokens of the streams in ms, their tokens a second in all, what became of the prompts.

    Raises Failed when streams do not run side by side, or end early.
    """
    most = int((seconds + BEGIN_S / 4) * PACE)
    streams = [Record(time.monotonic()) for _ in range(STREAMS)]
    arrivals: list[Record] = []
    tasks = [asyncio.create_task(target.ask(Prompt(texts.sized(STREAM_PROMPT)), most, record)) for record in streams]
    prompts = [Prompt(texts.sized(size)) for _ in range(int(seconds / every_s))]
    try:
        await _begun(streams)
        window = Window(began := time.monotonic(), began + seconds)
        for number, prompt in enumerate(prompts):
            await asyncio.sleep(began + number * every_s - time.monotonic())
            arrivals.append(Record(time.monotonic()))
            tasks.append(asyncio.create_task(target.ask(prompt, 2, arrivals[-1])))
        await asyncio.sleep(window.ended - time.monotonic())
        if errors := [r.error or "it ended early" for r in streams if r.ended]:
            raise Failed(f"a stream: {errors[0]}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [gap for record in streams for gap in window.gaps(record.pieces)]
    answered = [r.ttft for r in arrivals if r.ttft is not None]
    return {
        "itl_p99_ms": percentile(gaps, 99) * 1e3,
        "itl_p50_ms": percentile(gaps, 50) * 1e3,
        "itl_max_ms": max(gaps) * 1e3,
        "tokens_per_s": sum(window.count(record.pieces) for record in streams) / seconds,
        "prompts": len(arrivals),
        "prompts_answered": len(answered),
        "prompt_ttft_ms": statistics.median(answered) * 1e3 if answered else None,
    }


async def calm(target: HttpTarget) -> None:
    """Wait until what was given up is out of the way. Raises Failed."""
    deadline = time.monotonic() + CALM_S
    while time.monotonic() < deadline:
        await target.ask(Prompt("Hello"), 2, record := Record(time.monotonic()))
        if not record.error and record.e2e < 1.0:
            return
        await asyncio.sleep(0.5)
    raise Failed(f"it is still at work {CALM_S:.0f} s after all requests were given up")


async def _begun(streams: Sequence[Record]) -> None:
    deadline = time.monotonic() + BEGIN_S
    while any(len(record.pieces) < BEGUN for record in streams):
        if errors := [record.error for record in streams if record.ended]:
            raise Failed(f"a stream ended before the others began: {errors[0] or 'it was complete'}")
        if time.monotonic() > deadline:
            begun = sum(len(record.pieces) >= BEGUN for record in streams)
            raise Failed(f"{begun} of {len(streams)} streams ran at once")
        await asyncio.sleep(0.02)
