"""Exit 0 if this container's worker is alive: its own beat arrives over NATS within a few seconds.

A beat proves what matters from the outside: the process runs, its event loop turns and it reaches the bus.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import nats
from nats.errors import Error

from shared.config import Settings
from shared.subjects import Subjects, last

WAIT_S = 6.0


async def beats() -> None:
    """Return when the beat arrives. Raises TimeoutError, or what connecting raises."""
    settings = Settings()
    name = os.environ.get("TRINE_WORKER") or f"-{socket.gethostname()}"
    async with asyncio.timeout(WAIT_S):
        client = await nats.connect(settings.nats_url, error_cb=_ignore)
        try:
            subscription = await client.subscribe(Subjects(settings.served_name).beats)
            while not last((await subscription.next_msg(timeout=WAIT_S)).subject).endswith(name):
                pass
        finally:
            await client.close()


async def _ignore(error: Exception) -> None:
    """The deadline says all that matters; nats-py would print a traceback per attempt."""


def main() -> int:
    try:
        asyncio.run(beats())
    except (Error, OSError, TimeoutError) as error:
        print(f"no beat from this worker: {type(error).__name__} {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
