"""What Prometheus reads. Models are labels only while they are served: a client cannot make up labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from services.gateway.fleet import Fleet
from services.gateway.fleet_metrics import FleetCollector
from shared.messages import Usage

_FIRST = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """`outcome` is `ok`, `cancelled` (the client left), or the code of the error that the client was told.

    `name` is the gateway's, `own` are counters of its connection to NATS.
    """

    def __init__(self, fleet: Fleet, name: str, own: Callable[[], Mapping[str, int]]) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter("trine_requests", "HTTP requests for answers", ["model", "outcome"], registry=registry)
        self.inflight = Gauge("trine_requests_inflight", "Answers being waited for", registry=registry)
        self._first = Histogram(
            "trine_time_to_first_token_seconds",
            "From the request to its first token",
            ["model"],
            buckets=_FIRST,
            registry=registry,
        )
        self._between = Histogram(
            "trine_inter_token_latency_seconds", "Between two tokens", ["model"], buckets=_BETWEEN, registry=registry
        )
        self._whole = Histogram(
            "trine_request_duration_seconds",
            "From the request to its end",
            ["model"],
            buckets=_WHOLE,
            registry=registry,
        )
        self._prompt = Counter("trine_prompt_tokens", "Prompt tokens of complete answers", ["model"], registry=registry)
        self._cached = Counter("trine_cached_prompt_tokens", "Those whose KV was cached", ["model"], registry=registry)
        self._generated = Counter("trine_generation_tokens", "Tokens of complete answers", ["model"], registry=registry)
        self._drafted = Counter(
            "trine_drafted_tokens", "Tokens that were guessed for them", ["model"], registry=registry
        )
        self._accepted = Counter("trine_accepted_tokens", "Guesses that were right", ["model"], registry=registry)
        self.registry.register(FleetCollector(fleet, name, own))
        ProcessCollector(registry=self.registry)

    def outcomes(self) -> tuple[int, int]:
        """Requests so far, and how many of them ended with an error or a client that left."""
        found = [s for metric in self.requests.collect() for s in metric.samples if s.name.endswith("_total")]
        return int(sum(s.value for s in found)), int(sum(s.value for s in found if s.labels["outcome"] != "ok"))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def first_token(self, model: str, seconds: float) -> None:
        self._first.labels(model).observe(seconds)

    def later_tokens(self, model: str, seconds: float, tokens: int) -> None:
        """`seconds` since the tokens before; several that came together share them."""
        self._between.labels(model).observe(seconds / max(tokens, 1))

    def complete(self, model: str, usage: Usage, seconds: float) -> None:
        self._whole.labels(model).observe(seconds)
        self._prompt.labels(model).inc(usage.prompt_tokens)
        self._cached.labels(model).inc(usage.cached_tokens)
        self._generated.labels(model).inc(usage.completion_tokens)
        self._drafted.labels(model).inc(usage.drafted_tokens)
        self._accepted.labels(model).inc(usage.accepted_tokens)
