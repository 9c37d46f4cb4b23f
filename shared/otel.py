"""Spans that OpenTelemetry records. Imported only where tracing is wanted: it needs the extra `otel`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from functools import cache

import structlog
from opentelemetry import trace
from opentelemetry.context import Context

from shared.tracing import Attributes, Kind, Span, Tracer, parent_of

NAME = "trine"
SAY_EVERY_S = 60.0
_KINDS = {kind: trace.SpanKind[kind.name] for kind in Kind}


class OtelSpan(Span):
    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        context = span.get_span_context()
        flags = context.trace_flags & trace.TraceFlags.SAMPLED
        known = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"
        super().__init__(known if context.is_valid else "")
        self.recording = span.is_recording()
        self._span = span
        self._tracer = tracer

    def child(
        self,
        name: str,
        kind: Kind = Kind.INTERNAL,
        attributes: Attributes | None = None,
        *,
        ago: float = 0.0,
        links: Iterable[Span] = (),
    ) -> Span:
        if not self.recording:
            return self
        span = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(self._span, Context()),
            kind=_KINDS[kind],
            attributes=dict(attributes or {}),
            links=[trace.Link(link._span.get_span_context()) for link in links if isinstance(link, OtelSpan)],
            start_time=_before(ago),
        )
        return OtelSpan(self._tracer, span)

    def set(self, attributes: Attributes) -> None:
        if self.recording:
            self._span.set_attributes(dict(attributes))

    def end(self, error: str = "") -> None:
        if not self.recording:
            return
        self.recording = False
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR))
        self._span.end()


class OtelTracer:
    """`within`: a span without another parent belongs to the program's current one."""

    def __init__(self, provider: trace.TracerProvider, *, within: bool = False) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(NAME)
        self._within = within

    def begin(
        self,
        name: str,
        kind: Kind,
        headers: Mapping[str, str],
        attributes: Attributes | None = None,
        *,
        ago: float = 0.0,
    ) -> Span:
        context = _context(parent_of(headers)) or (None if self._within else Context())
        given = dict(attributes or {})
        span = self._tracer.start_span(name, context, _KINDS[kind], given, start_time=_before(ago))
        return OtelSpan(self._tracer, span)

    def close(self, timeout: float) -> None:
        shutdown = getattr(self._provider, "shutdown", None)
        if shutdown is not None:
            # A collector that does not answer must not hold up the end: the thread is left behind.
            thread = threading.Thread(target=shutdown, name="traces", daemon=True)
            thread.start()
            thread.join(timeout)


def _before(ago: float) -> int | None:
    return time.time_ns() - round(ago * 1e9) if ago > 0 else None


def _context(parent: str) -> Context | None:
    if not parent:
        return None
    _, trace_id, span_id, flags = parent.split("-")
    sampled = trace.TraceFlags(int(flags, 16) & trace.TraceFlags.SAMPLED)
    context = trace.SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=sampled)
    return trace.set_span_in_context(trace.NonRecordingSpan(context), Context())


@cache
def ambient() -> Tracer:
    """Of the program that this one is a library of; nothing is recorded unless it has set up OpenTelemetry."""
    return OtelTracer(trace.get_tracer_provider(), within=True)


def exporting(endpoint: str, model: str, role: str, worker: str) -> Tracer:
    """Sends to `endpoint` (OTLP over HTTP, `/v1/traces` below it), or to where OTEL_* variables say.

    Raises ImportError without the extra `otel`.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    _log_rarely()
    own = {"service.namespace": NAME, "service.instance.id": worker, "trine.role": role, "trine.model": model}
    if not os.environ.get("OTEL_SERVICE_NAME") and "service.name=" not in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        own["service.name"] = f"{NAME}-{role}"
    # Nobody waits at exit: `close` has its own bound.
    provider = TracerProvider(resource=Resource.create(dict(own)), shutdown_on_exit=False)
    where = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=where)))
    return OtelTracer(provider)


class _Rarely(logging.Handler):
    """OpenTelemetry's trouble as one of our lines, now and then: a collector that is away would fill a log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        if time.monotonic() - self._said >= SAY_EVERY_S:
            self._said = time.monotonic()
            structlog.get_logger(__name__).warning("traces may be lost", reason=f"{record.getMessage():.300}")


def _log_rarely() -> None:
    log = logging.getLogger("opentelemetry")
    log.handlers = [_Rarely()]
    log.propagate = False
