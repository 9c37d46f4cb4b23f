"""Whether a NATS server lets in who has no credentials. What it says of itself does not always tell, so we try."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import ParseResult

import structlog

from shared.bus.bulk_link import BulkLink
from shared.bus.bulk_wire import DEFAULT_PORT, Server
from shared.errors import BusError, ConfigError

log = structlog.get_logger(__name__)

ATTEMPTS = 2
ATTEMPT_S = 3.0


class Access:
    """Whether the server of a connection refuses who has no credentials. Found out when somebody wants to know."""

    def __init__(
        self,
        name: str,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._name = name
        self._spawn = spawn
        self._tls = tls
        self._answer: bool | None = None
        self._finding: asyncio.Task[None] | None = None

    def refuses(self, url: ParseResult | None) -> bool | None:
        """None: not known yet, or not to be found out just now; asking again tries again."""
        if self._answer is None and url is not None and (self._finding is None or self._finding.done()):
            self._finding = self._spawn(self._find_out(url))
        return self._answer

    def forget(self) -> None:
        """The connection is to another server now."""
        self._answer = self._finding = None

    async def _find_out(self, url: ParseResult) -> None:
        answer = await refuses_anonymous(url, self._name, self._tls)
        if self._finding is asyncio.current_task():  # else it is about the server before
            self._answer = answer


async def refuses_anonymous(url: ParseResult, name: str, tls: ssl.SSLContext | None = None) -> bool | None:
    """True when the server at `url` refused a connection without credentials, False when it did not, None when it was
    not to be found out. Takes a connection of its own, whose refusal the server logs, and a few seconds at most.
    """
    server = Server(url.hostname or "", url.port or DEFAULT_PORT, url.scheme == "tls")
    try:
        async with asyncio.timeout(ATTEMPTS * ATTEMPT_S):
            return await asyncio.to_thread(_refused, server, name, tls)
    except TimeoutError:
        log.warning("cannot tell whether NATS asks for credentials", server=server.label)
        return None


def _refused(server: Server, name: str, tls: ssl.SSLContext | None) -> bool | None:
    for _ in range(ATTEMPTS):
        link = BulkLink([server], f"{name}/anonymous", tls)
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
    return None
