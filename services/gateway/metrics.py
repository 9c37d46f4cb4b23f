"""What Prometheus reads. Models are labels only while they are served: a client cannot make up labels."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from services.gateway.fleet import Fleet
from shared.messages import Usage

_FIRST = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """`outcome` is `ok`, `cancelled` (the client left), or the code of the error that the client was told."""

    def __init__(self, fleet: Fleet) -> None:
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
        self.registry.register(_FleetCollector(fleet))
        ProcessCollector(registry=self.registry)

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


class _FleetCollector(Collector):
    """What workers say of themselves, as of the scrape."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        labels = ["model", "role", "worker"]
        up = GaugeMetricFamily("trine_worker_up", "1 for each worker that is heard; 0: it takes no work", labels=labels)
        running = GaugeMetricFamily("trine_worker_running", "Requests or jobs it is at work on", labels=labels)
        waiting = GaugeMetricFamily("trine_worker_waiting", "Those it has taken that wait", labels=labels)
        free = GaugeMetricFamily("trine_worker_free_blocks", "Free KV blocks in its pool", labels=labels)
        events = CounterMetricFamily("trine_worker_events", "Its own counts", labels=[*labels, "event"])
        for model, beat in self._fleet.workers(time.monotonic()):
            names = [model, beat.role, beat.worker]
            up.add_metric(names, float(not beat.draining))
            running.add_metric(names, beat.load.running)
            waiting.add_metric(names, beat.load.waiting)
            free.add_metric(names, beat.load.free_blocks)
            for event, count in beat.counters.items():
                events.add_metric([*names, event], count)
        return [up, running, waiting, free, events]
