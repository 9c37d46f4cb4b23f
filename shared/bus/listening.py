"""Subscriptions of a process that starts: they are made as soon as there is a connection to make them on."""

from __future__ import annotations

import asyncio
import time

import structlog

from shared.bus.base import Bus, Handler, Subscription
from shared.errors import BusDisconnected

log = structlog.get_logger()
RETRY_S = 0.5
SAY_EVERY_S = 10.0


async def listen(bus: Bus, subject: str, handler: Handler, queue: str = "") -> Subscription:
    """As `bus.subscribe`, which fails while the connection is lost: a worker that was about to serve then would die of
    a moment's trouble. Ends when the caller is cancelled. Raises PermissionDenied.
    """
    said = float("-inf")
    while True:
        try:
            return await bus.subscribe(subject, handler, queue)
        except BusDisconnected as error:
            if time.monotonic() - said >= SAY_EVERY_S:
                said = time.monotonic()
                log.warning("waiting for a connection to subscribe on", subject=subject, reason=error.message)
            await asyncio.sleep(RETRY_S)
