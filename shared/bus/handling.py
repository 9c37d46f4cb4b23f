"""Running the handlers of subscriptions so that none of their errors is lost or ends the subscription."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.bus.base import Handler, Incoming


async def run_handler(handler: Handler, message: Incoming, failed: Callable[[BaseException], None]) -> None:
    """Await `handler(message)`; what it raises goes to `failed`. Raises only when this task itself is cancelled."""
    try:
        await handler(message)
    except asyncio.CancelledError as error:
        # A handler that awaited something cancelled raises this too.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        failed(error)
    except Exception as error:
        failed(error)
