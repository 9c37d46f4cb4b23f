"""Traces that follow a request through the fleet: spans, and the W3C `traceparent` header that carries them over NATS.

Without tracing a span is `UNTRACED`, which does nothing, or one that hands on the parent it was given. OpenTelemetry is
imported only where it is configured (`shared.otel`), or where a client's program has it loaded itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Protocol

from shared.config import Settings
from shared.errors import ConfigError

HEADER = "traceparent"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[0-3]")

Attributes = Mapping[str, str | int | float | bool | list[str]]


class Kind(Enum):
    """As OpenTelemetry names them."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"
    PRODUCER = "producer"
    CONSUMER = "consumer"


def parent_of(headers: Mapping[str, str]) -> str:
    """The `traceparent` in a message's headers, "" unless it is one of version 00. https://www.w3.org/TR/trace-context

    Headers come from anybody. `tracestate` is not read: its text would be handed on to others.
    """
    value = headers.get(HEADER, "")
    return value if _PARENT.fullmatch(value) else ""


class Span:
    """What takes time, within what takes longer. This one is not recorded: what is below it has the same parent."""

    __slots__ = ("headers", "recording")

    def __init__(self, parent: str = "") -> None:
        self.headers: dict[str, str] = {HEADER: parent} if parent else {}
        """What makes spans of another process its children."""
        self.recording = False

    def child(
        self,
        name: str,
        kind: Kind = Kind.INTERNAL,
        attributes: Attributes | None = None,
        *,
        ago: float = 0.0,
        links: Iterable[Span] = (),
    ) -> Span:
        """A span within this one that began `ago` seconds before now."""
        return self

    def set(self, attributes: Attributes) -> None:
        """No prompt, no answer: spans go where other people look."""

    def end(self, error: str = "") -> None:
        """The first call counts. `error`: a code, if it failed."""


UNTRACED = Span()


class Tracer(Protocol):
    def begin(
        self,
        name: str,
        kind: Kind,
        headers: Mapping[str, str],
        attributes: Attributes | None = None,
        *,
        ago: float = 0.0,
    ) -> Span:
        """A span below the one that untrusted `headers` name, or the first of a trace."""
        ...

    def close(self, timeout: float) -> None:
        """Send what is left, for so many seconds at most. Blocking."""
        ...


class Off:
    """Records nothing, and hands on what it is given: a process without tracing does not cut a trace in two."""

    def begin(
        self,
        name: str,
        kind: Kind,
        headers: Mapping[str, str],
        attributes: Attributes | None = None,
        *,
        ago: float = 0.0,
    ) -> Span:
        parent = parent_of(headers) if headers else ""
        return Span(parent) if parent else UNTRACED

    def close(self, timeout: float) -> None:
        pass


OFF = Off()
_installed: Tracer | None = None


def install(tracer: Tracer | None) -> None:
    """The tracer of this process from now on; None: none."""
    global _installed  # noqa: PLW0603 - as with logs, a process has one
    _installed = tracer


def tracer() -> Tracer:
    """Of a worker or a gateway. Ask for it once, after `configure`."""
    return _installed or OFF


def of_program() -> Tracer:
    """Of a client: that of the program it runs in, whose current span is the parent where no other is given."""
    if _installed is None and "opentelemetry.trace" in sys.modules:
        from shared.otel import ambient

        return ambient()
    return tracer()


def configure(settings: Settings, role: str, worker: str) -> None:
    """Trace this process if the settings, or OpenTelemetry's own variables, say where to. Raises ConfigError."""
    given = [name for name in ENDPOINTS if os.environ.get(name)]
    if not settings.otlp_endpoint and not given:
        return
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return
    try:
        from shared.otel import exporting
    except ImportError:
        setting = "TRINE_OTLP_ENDPOINT" if settings.otlp_endpoint else given[0]
        raise ConfigError(f"{setting}: traces need the extra `otel`: pip install 'trine[otel]'") from None
    install(exporting(settings.otlp_endpoint, settings.served_name, role, worker))
