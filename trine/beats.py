"""Who is alive, by listening to beats for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from shared.bus.base import Bus, Incoming
from shared.codec import decode
from shared.errors import RequestError
from shared.messages import Beat
from shared.subjects import ALL_BEATS, Subjects, model_of

Seen = dict[tuple[str, str], Beat]
"""(model, worker) → its last beat."""


def beat_of(message: Incoming) -> tuple[str, Beat] | None:
    """(model, beat) of what comes on a beat's subject. None for what is no beat: anybody may publish there."""
    try:
        beat, model = decode(message.data, Beat), model_of(message.subject)
        if message.subject != Subjects(model).beat(beat.role, beat.worker):
            return None  # whoever may publish there is somebody else
    except (RequestError, ValueError, IndexError):
        return None
    return model, beat


async def listen(
    bus: Bus, timeout: float, subject: str = ALL_BEATS, enough: Callable[[Seen], bool] = lambda _: False
) -> Seen:
    """Beats on `subject` for `timeout` seconds, or until `enough`. Raises BusError when it cannot subscribe."""
    seen: Seen = {}
    done = asyncio.Event()

    async def note(message: Incoming) -> None:
        if (heard := beat_of(message)) is None:
            return
        model, beat = heard
        seen[model, beat.worker] = beat
        if enough(seen):
            done.set()

    subscription = await bus.subscribe(subject, note)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await done.wait()
    finally:
        await subscription.unsubscribe()
    return seen


def decoded(seen: Seen) -> list[str]:
    """Models that a decode worker was heard of."""
    return sorted({model for (model, _), beat in seen.items() if beat.role == "decode"})


def nobody(model: str, running: Sequence[str]) -> str:
    """What to say where `model` has no decode worker and these have."""
    others = ", ".join(running)
    return f"no decode worker for model {model!r:.140}; running: {others or 'none; start one with `trine up`'}"
