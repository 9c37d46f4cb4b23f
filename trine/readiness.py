"""Wait until a fleet answers for itself: beats of enough workers of every role."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from shared.bus.base import Bus
from shared.errors import Unavailable
from shared.subjects import Subjects
from trine.beats import Seen, listen

POLL_S = 0.1

Counts = Mapping[str, int]
"""Workers per role."""
Progress = Callable[[Counts], None]


def up(seen: Seen) -> Counter[str]:
    """Workers per role that take work."""
    return Counter(beat.role for beat in seen.values() if not beat.draining)


def lacking(counts: Counts, seen: Seen) -> dict[str, int]:
    """How many more workers are wanted, per role."""
    there = up(seen)
    return {role: n - there[role] for role, n in counts.items() if there[role] < n}


async def await_ready(
    bus: Bus,
    model: str,
    counts: Counts,
    timeout: float,
    *,
    progress: Progress = lambda _: None,
    failed: Callable[[], str | None] = lambda: None,
) -> None:
    """Returns when `counts` workers beat. Raises Unavailable after `timeout` seconds or when `failed` says why."""
    heard: Seen = {}

    def enough(seen: Seen) -> bool:
        heard.update(seen)
        progress(up(seen))
        return not lacking(counts, seen)

    watch = asyncio.create_task(listen(bus, timeout, Subjects(model).beats, enough))
    try:
        while not watch.done():
            await asyncio.wait({watch}, timeout=POLL_S)
            if why := failed():
                raise Unavailable(why)
        await watch
    finally:
        watch.cancel()
    if missing := lacking(counts, heard):
        names = ", ".join(f"{n} {role}" for role, n in missing.items())
        raise Unavailable(f"not ready after {timeout:g} s: still waiting for {names} of model {model!r}")
