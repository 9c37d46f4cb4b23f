"""Exit 0 if this container's worker is alive: its own beat arrives over NATS within a few seconds.

A beat proves what matters from the outside: the process runs, its event loop turns and it reaches the bus. With the
argument `--excuse-nats` no worker is blamed while NATS cannot be reached: it would be started again, which cannot help.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from shared import telemetry
from shared.bus.login import Login
from shared.bus.nats import NatsBus
from shared.config import Settings
from shared.errors import BusError, TrineError
from shared.subjects import Subjects
from trine.beats import Seen, listen

WAIT_S = 6.0


async def beats() -> bool:
    """Whether the beat arrives. Raises TrineError."""
    settings = Settings()
    name = os.environ.get("TRINE_WORKER") or f"-{socket.gethostname()}"

    def mine(seen: Seen) -> bool:
        return any(worker.endswith(name) for _, worker in seen)

    bus = await NatsBus.connect(settings.nats_url, name=f"{name}/health", login=Login.of(settings), wait=WAIT_S)
    try:
        return mine(await listen(bus, WAIT_S, Subjects(settings.served_name).beats, mine))
    finally:
        await bus.close()


def main() -> int:
    telemetry.configure("error")
    try:
        why = "" if asyncio.run(beats()) else f"none within {WAIT_S:g} s"
    except BusError as error:
        if sys.argv[1:] == ["--excuse-nats"]:
            return 0
        why = error.message
    except TrineError as error:
        why = error.message
    if why:
        print(f"no beat from this worker: {why}", file=sys.stderr)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
