"""uvicorn, as the gateway runs it: bounded connections, and an end that cuts no stream without a word."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from types import FrameType

import structlog
import uvicorn

from services.gateway.app import create_app
from services.gateway.gateway import Gateway
from services.gateway.protocol import Bounds, bounded

GRACE_S = 2.0
"""For last events to be sent, after the time that running answers have."""
KEEP_ALIVE_S = 10
log = structlog.get_logger()


class GatewayServer(uvicorn.Server):
    """The first SIGTERM or SIGINT stops accepting and lets answers finish, within `drain_s`; a second ends them."""

    def __init__(self, gateway: Gateway) -> None:
        settings = gateway.settings
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # anybody could fill a log with warnings
        config = uvicorn.Config(
            create_app(gateway),
            host=settings.host,
            port=settings.port,
            http=bounded(Bounds.of(settings)),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(settings.drain_s + GRACE_S),
        )
        super().__init__(config)
        self._gateway = gateway
        gateway.on_failure = self._fail

    @property
    def address(self) -> str:
        """Where it listens, once it has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not uvicorn's own: that one ends the process by the same signal, and the exit code would not be 0."""
        if self.should_exit:
            self._gateway.end()
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("listening", address=self.address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("draining")
        self._gateway.drain()
        timer = asyncio.get_running_loop().call_later(self._gateway.settings.drain_s, self._gateway.end)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
        log.info("stopped")

    def _fail(self) -> None:
        self.should_exit = True
