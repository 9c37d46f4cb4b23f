"""NATS's service API: every process of a fleet answers `nats micro ls`, `info` and `stats`.

Schemas: io.nats.micro.v1 (github.com/nats-io/nats-architecture-and-design, ADR-32). nats-py's own `nats.micro` takes a
client of nats-py; the bus makes a new one when nats-py takes a loss for the end, and its subscriptions would be gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from typing import Any

import structlog

from shared.bus.base import Bus, Incoming
from shared.bus.listening import listen
from shared.bus.wire import INBOX
from shared.errors import BusError, PermissionDenied, TooLarge
from shared.subjects import service_name, service_subjects, token

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Report:
    """What a process says of itself. `subject` is where it takes work."""

    endpoint: str
    subject: str
    requests: int
    errors: int
    busy_ms: int
    """How long it was at work, in all."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else there is to count; becomes JSON."""
    queue: str = ""


@cache
def version() -> str:
    """Of this program, as semantic versioning spells it."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("trine")
    return "0.0.0"


class Micro:
    """The service `trine-<role>`, of which each process is an instance: its id is its name, as a subject's token."""

    def __init__(self, bus: Bus, role: str, name: str, report: Callable[[], Report]) -> None:
        self._bus = bus
        self._role = role
        self._id = token(name)
        self._report = report
        self._subjects = service_subjects(role, self._id)
        self._started = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        self._answers = {"PING": self.ping, "INFO": self.info, "STATS": self.stats}

    async def start(self) -> None:
        """Waits for a connection. Where NATS does not let this user be found, it is not found, and all else goes on."""
        try:
            for subject in self._subjects:
                await listen(self._bus, subject, self._on_ask)
        except PermissionDenied as error:
            log.info("not to be found by `nats micro`", reason=error.message)

    async def _on_ask(self, message: Incoming) -> None:
        answer = self._answers.get(message.subject.split(".")[1])
        if answer is None or not message.reply.startswith(INBOX):  # it would go there with this process's rights
            return
        with suppress(BusError, TooLarge):
            await self._bus.publish(message.reply, json.dumps(answer()).encode())

    def ping(self) -> dict[str, Any]:
        return self._said("ping", self._report())

    def info(self) -> dict[str, Any]:
        report = self._report()
        endpoint = {"name": report.endpoint, "subject": report.subject, "queue_group": report.queue, "metadata": {}}
        description = f"Trine: {self._role}"
        return self._said("info", report) | {"description": description, "endpoints": [endpoint]}

    def stats(self) -> dict[str, Any]:
        report = self._report()
        busy = report.busy_ms * 1_000_000
        endpoint = {
            "name": report.endpoint,
            "subject": report.subject,
            "queue_group": report.queue,
            "num_requests": report.requests,
            "num_errors": report.errors,
            "last_error": "",
            "processing_time": busy,
            "average_processing_time": busy // max(report.requests, 1),
            "data": dict(report.data),
        }
        return self._said("stats", report) | {"started": self._started, "endpoints": [endpoint]}

    def _said(self, kind: str, report: Report) -> dict[str, Any]:
        return {
            "type": f"io.nats.micro.v1.{kind}_response",
            "name": service_name(self._role),
            "id": self._id,
            "version": version(),
            "metadata": {"role": self._role, **report.metadata},
        }
