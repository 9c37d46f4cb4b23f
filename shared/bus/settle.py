"""Ending a job where nothing more can be done about trouble."""

from __future__ import annotations

from collections.abc import Awaitable

import structlog

from shared.errors import BusError

log = structlog.get_logger()


async def settle(ending: Awaitable[None]) -> None:
    """Await a job's `ack`, `nak`, `term` or `hold`. Without the bus the job comes again after `ack_wait`."""
    try:
        await ending
    except BusError as error:
        log.debug("job not settled; it comes again", error=str(error))
