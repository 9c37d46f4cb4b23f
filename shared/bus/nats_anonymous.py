"""Whether a NATS server lets in who has no credentials. What it says of itself does not always tell, so we try."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import ParseResult

import structlog

from shared.bus.bulk_link import BulkLink
from shared.bus.bulk_wire import DEFAULT_PORT, Server
from shared.errors import BusError, ConfigError

log = structlog.get_logger(__name__)

ATTEMPTS = 2
ATTEMPT_S = 3.0


async def refuses_anonymous(url: ParseResult, name: str) -> bool:
    """True when the server at `url` refused a connection without credentials; False when it did not, or when it was
    not to be found out. Takes a connection of its own, whose refusal the server logs, and a few seconds at most.
    """
    server = Server(url.hostname or "", url.port or DEFAULT_PORT, url.scheme == "tls")
    try:
        async with asyncio.timeout(ATTEMPTS * ATTEMPT_S):
            return await asyncio.to_thread(_refused, server, name)
    except TimeoutError:
        log.warning("cannot tell whether NATS asks for credentials", server=server.label)
        return False


def _refused(server: Server, name: str) -> bool:
    for _ in range(ATTEMPTS):
        link = BulkLink([server], f"{name}/anonymous")
        try:
            with link.operation(time.monotonic() + ATTEMPT_S):
                link.connect()
            return False
        except ConfigError:
            return True
        except BusError as error:
            log.warning("cannot tell whether NATS asks for credentials", server=server.label, error=str(error))
        finally:
            link.close()
    return False
