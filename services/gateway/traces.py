"""The span of an HTTP request, in which those of its choices are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from services.gateway.requests import Call, Kind
from shared import tracing
from shared.tracing import Attributes, Span

ROUTES = {Kind.CHAT: ("/v1/chat/completions", "chat"), Kind.TEXT: ("/v1/completions", "text_completion")}


@contextmanager
def traced(call: Call, request_id: str, headers: Mapping[str, str]) -> Iterator[Span]:
    """Begun, below the span that the caller's headers name; whoever is given it ends it, unless this raises."""
    route, operation = ROUTES[call.kind]
    told: Attributes = {
        "http.request.method": "POST",
        "http.route": route,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "trine",
        "gen_ai.request.model": call.model,
        "gen_ai.request.choice.count": len(call.choices),
        "gen_ai.request.stream": call.stream,
        "trine.request.id": request_id,
    }
    span = tracing.tracer().begin(f"POST {route}", tracing.Kind.SERVER, headers, told)
    try:
        yield span
    except Exception as error:
        span.end(getattr(error, "code", None) or "internal")
        raise
