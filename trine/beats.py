"""Who is alive, by listening to beats for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from shared.bus.base import Bus, Incoming
from shared.codec import decode
from shared.errors import RequestError
from shared.messages import Beat
from shared.subjects import ALL_BEATS, Subjects, model_of

Seen = dict[tuple[str, str], Beat]
"""(model, worker) → its last beat."""


async def listen(
    bus: Bus, timeout: float, subject: str = ALL_BEATS, enough: Callable[[Seen], bool] = lambda _: False
) -> Seen:
    """Beats on `subject` for `timeout` seconds, or until `enough`. Raises BusError when it cannot subscribe."""
    seen: Seen = {}
    done = asyncio.Event()

    async def note(message: Incoming) -> None:
        try:
            beat = decode(message.data, Beat)
            model = model_of(message.subject)
            if message.subject != Subjects(model).beat(beat.role, beat.worker):
                return  # whoever may publish there is somebody else
            seen[model, beat.worker] = beat
        except (RequestError, ValueError, IndexError):
            return  # not a beat; anybody may publish here
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
