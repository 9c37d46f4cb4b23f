"""What goes wrong on a connection to NATS, as counters and few log lines."""

from __future__ import annotations

import time

import structlog
from nats import errors

from shared.bus.nats_client import denial_in, without_credentials

log = structlog.get_logger(__name__)

LOG_EVERY = 5.0
"""Seconds between two lines about what the server reports, which may be the same for each message."""


class Trouble:
    def __init__(self, servers: list[str], name: str) -> None:
        self.counters = {"reconnects": 0, "handler_errors": 0, "slow_consumer": 0, "denied": 0, "errors": 0}
        self._servers = servers
        self._name = name
        self._logged_at = float("-inf")

    def handler_failed(self, where: str, error: BaseException) -> None:
        self.counters["handler_errors"] += 1
        log.error("bus handler failed", subject=where, exc_info=error)

    def reported(self, error: Exception) -> None:
        """By the server or by nats-py, about the connection or a message that nobody waits for."""
        slow = isinstance(error, errors.SlowConsumerError)
        self.counters["slow_consumer" if slow else "denied" if denial_in(error) else "errors"] += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY:
            self._logged_at = now
            text = str(error) or type(error).__name__
            log.warning("NATS error", server=without_credentials(self._servers), error=text, name=self._name)
