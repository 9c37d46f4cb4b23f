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


async def beats() -> bool:
    settings = Settings()
    name = os.environ.get("TRINE_WORKER") or f"-{socket.gethostname()}"
    client = await nats.connect(settings.nats_url, connect_timeout=2, allow_reconnect=False)
    try:
        subscription = await client.subscribe(Subjects(settings.served_name).beats)
        async with asyncio.timeout(WAIT_S):
            while True:
                message = await subscription.next_msg(timeout=WAIT_S)
                if last(message.subject).endswith(name):
                    return True
    finally:
        await client.close()


def main() -> int:
    try:
        return 0 if asyncio.run(beats()) else 1
    except (Error, OSError, TimeoutError) as error:
        print(f"no beat from this worker: {type(error).__name__} {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
