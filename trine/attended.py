"""An answer that somebody waits for at a terminal: when nobody is there to give it, that is said at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from shared.bus.base import Bus
from shared.errors import PermissionDenied, Unavailable
from trine.beats import Seen, decoded, listen, nobody
from trine.merge import Delta
from trine.stream import Stream

HEARD_S = 4.0
"""A live worker is heard in so long, also one that is about to take over."""


async def attended(bus: Bus, stream: Stream) -> AsyncIterator[Delta]:
    """As iterating over `stream`. Raises Unavailable too, when no decode worker of its model is heard meanwhile."""
    deltas = aiter(stream)
    first = asyncio.ensure_future(anext(deltas, None))
    watch = asyncio.create_task(somebody(bus, stream.model))
    try:
        await asyncio.wait({first, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            watch.result()
        if (delta := await first) is None:
            return
        yield delta
        async for delta in deltas:
            yield delta
    finally:
        first.cancel()
        watch.cancel()
        await asyncio.gather(first, watch, return_exceptions=True)


async def somebody(bus: Bus, model: str) -> None:
    """Returns when a decode worker of the model is heard, or nobody may listen. Raises Unavailable if none is."""

    def found(seen: Seen) -> bool:
        return model in decoded(seen)

    try:
        seen = await listen(bus, HEARD_S, enough=found)
    except PermissionDenied:
        return  # a tenant: it hears its own answers alone
    if not found(seen):
        raise Unavailable(nobody(model, decoded(seen)))
