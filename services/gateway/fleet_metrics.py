"""What Prometheus reads of the fleet: what workers say of themselves in their beats, as of the scrape.

Counters of beats that users need have series of their own, by `SERIES` and `BY_REASON`; the others are in
`trine_worker_events_total`. Every gateway tells the same of every worker.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.fleet import Fleet
from shared.messages import Beat
from shared.subjects import PRIORITIES, Subjects
from shared.telemetry import STEP_MS
from trine.roster import QUEUE_S, bounded

WORKER = ("model", "role", "worker")
DECODE, BLOCKS, ALL = ("decode",), ("decode", "prefill"), ("decode", "prefill", "drafter", "gateway")
EVENT = re.compile(r"[a-z0-9_]{1,64}")
STEP = re.compile(r"step_(ms|le_(\d+|inf))")


class Series(NamedTuple):
    """Counters of beats that are one metric; `counters` gives each one's value of the label, "" where there is none.

    Workers of these roles have all of them: one that never counted is not in the beat, and 0 here. Without that, the
    first event would be no increase.
    """

    name: str
    help: str
    label: str
    counters: Mapping[str, str]
    roles: tuple[str, ...]


SERIES = (
    Series("trine_worker_generated_tokens", "Tokens generated", "", {"generated_tokens": ""}, DECODE),
    Series(
        "trine_worker_prompt_tokens", "Prompt tokens of requests that have begun", "", {"prompt_tokens": ""}, DECODE
    ),
    Series("trine_worker_drafted_tokens", "Drafted tokens that were verified", "", {"drafted_tokens": ""}, DECODE),
    Series("trine_worker_accepted_tokens", "Those that were what the model chose", "", {"accepted_tokens": ""}, DECODE),
    Series(
        "trine_worker_cut_drafts",
        "Drafts of which a token was not what the model chose",
        "",
        {"cut_drafts": ""},
        DECODE,
    ),
    Series(
        "trine_worker_prefill_tokens",
        "Prompt tokens whose KV this worker computed, or found cached",
        "source",
        {"prefill_tokens": "computed", "cached_tokens": "cached"},
        BLOCKS,
    ),
    Series(
        "trine_worker_computed_blocks", "KV blocks of prompts that it computed", "", {"computed_blocks": ""}, BLOCKS
    ),
    Series("trine_worker_preemptions", "Sequences that had to give up their blocks", "", {"preemptions": ""}, DECODE),
    Series(
        "trine_worker_redeliveries", "Requests taken up again after another worker", "", {"redeliveries": ""}, DECODE
    ),
    Series(
        "trine_prefill_jobs",
        "Prefill jobs by what became of them: at decode workers published, joined, given_up; at prefill workers "
        "done, refused",
        "outcome",
        {
            "prefill_jobs": "published",
            "prefill_joined": "joined",
            "prefill_given_up": "given_up",
            "jobs_done": "done",
            "jobs_refused": "refused",
        },
        BLOCKS,
    ),
    Series(
        "trine_cache_hit_blocks",
        "KV blocks found, by tier: the worker's pool (GPU memory, where there is a GPU), the machine's memory, NATS",
        "tier",
        {"cache_pool_hit": "pool", "cache_host_hit": "host", "cache_hit": "nats"},
        BLOCKS,
    ),
    Series(
        "trine_cache_miss_blocks",
        "KV blocks not found",
        "tier",
        {"cache_host_miss": "host", "cache_miss": "nats"},
        BLOCKS,
    ),
    Series(
        "trine_cache_rejected_blocks",
        "Damaged or foreign blocks among those not found",
        "tier",
        {"cache_host_reject": "host", "cache_reject": "nats"},
        BLOCKS,
    ),
    Series(
        "trine_cache_evicted_blocks",
        "KV blocks that had to go; of NATS as each worker saw it",
        "tier",
        {"cache_pool_evicted": "pool", "cache_host_evicted": "host", "cache_evicted": "nats"},
        BLOCKS,
    ),
    Series(
        "trine_cache_read_bytes",
        "KV bytes transferred into the pool",
        "tier",
        {"cache_host_bytes_in": "host", "cache_bytes_in": "nats"},
        BLOCKS,
    ),
    Series(
        "trine_cache_written_bytes",
        "KV bytes transferred out of the pool",
        "tier",
        {"cache_host_bytes_out": "host", "cache_bytes_out": "nats"},
        BLOCKS,
    ),
    Series("trine_nats_reconnects", "Connections to NATS that were lost and made anew", "", {"reconnects": ""}, ALL),
    Series(
        "trine_nats_errors",
        "Trouble on the connection to NATS",
        "kind",
        {kind: kind for kind in ("denied", "errors", "handler_errors", "slow_consumer", "bus_retries")},
        ALL,
    ),
)
BY_REASON = {
    "finished_": ("trine_worker_requests_finished", "Requests answered, by finish reason"),
    "failed_": ("trine_worker_requests_failed", "Requests that ended with an error, by its code"),
    "refused_": ("trine_worker_requests_rejected", "Requests not begun, by the error's code"),
}
_KNOWN = frozenset(counter for series in SERIES for counter in series.counters)


class FleetCollector(Collector):
    """`own`: counters of the gateway itself, which is a worker of role `gateway` here."""

    def __init__(self, fleet: Fleet, name: str, own: Callable[[], Mapping[str, int]]) -> None:
        self._fleet = fleet
        self._name = name
        self._own = own

    def collect(self) -> Iterable[Metric]:
        now = time.monotonic()
        beats: _Beats = [((model, beat.role, beat.worker), beat) for model, beat in self._fleet.workers(now)]
        counts: _Counts = [(names, beat.counters) for names, beat in beats]
        counts.append((("", "gateway", self._name), self._own()))
        yield from _loads(beats)
        for series in SERIES:
            yield _series(series, counts)
        for prefix, (name, help_) in BY_REASON.items():
            yield _by_reason(name, help_, prefix, counts)
        yield _steps(counts)
        yield _events(counts)
        yield from self._queues(now)

    def _queues(self, now: float) -> Iterator[Metric]:
        requests = GaugeMetricFamily(
            "trine_queue_waiting_requests", "In JetStream, taken by no worker yet", labels=["model", "priority"]
        )
        jobs = GaugeMetricFamily(
            "trine_queue_waiting_prefill_jobs", "In JetStream, taken by no worker yet", labels=["model"]
        )
        for name, model in self._fleet.roster.models.items():
            subjects = Subjects(name)
            known = {queue: count for queue, (count, at) in model.queued.items() if now - at < QUEUE_S}
            for priority in PRIORITIES:
                if (count := known.get(subjects.request_consumer(priority))) is not None:
                    requests.add_metric([name, priority], count)
            if (count := known.get(subjects.prefill_consumer)) is not None:
                jobs.add_metric([name], count)
        yield from (requests, jobs)


_Beats = list[tuple[tuple[str, str, str], Beat]]
_Counts = list[tuple[tuple[str, str, str], Mapping[str, int]]]


def _loads(beats: _Beats) -> Iterator[Metric]:
    up = GaugeMetricFamily("trine_worker_up", "1 for each worker that is heard; 0: it takes no work", labels=WORKER)
    running = GaugeMetricFamily("trine_worker_running", "Requests or jobs it is at work on", labels=WORKER)
    waiting = GaugeMetricFamily("trine_worker_waiting", "Those it has taken that wait", labels=WORKER)
    blocks = GaugeMetricFamily("trine_worker_blocks", "KV blocks in its pool", labels=WORKER)
    free = GaugeMetricFamily("trine_worker_free_blocks", "Those that nothing running holds", labels=WORKER)
    cached = GaugeMetricFamily("trine_worker_cached_blocks", "Those that can be found again", labels=WORKER)
    stored = GaugeMetricFamily("trine_cache_stored_bytes", "KV bytes cached, as it sees it", labels=[*WORKER, "tier"])
    for names, beat in beats:
        load = beat.load
        up.add_metric(names, float(not beat.draining))
        running.add_metric(names, load.running)
        waiting.add_metric(names, load.waiting)
        if beat.identity is None:  # a drafter, which shares no blocks
            continue
        blocks.add_metric(names, load.blocks)
        free.add_metric(names, load.free_blocks)
        cached.add_metric(names, load.cached_blocks)
        stored.add_metric([*names, "pool"], load.cached_blocks * beat.identity.block_bytes)
        stored.add_metric([*names, "host"], load.host_bytes)
        stored.add_metric([*names, "nats"], load.stream_bytes)
    yield from (up, running, waiting, blocks, free, cached, stored)


def _series(series: Series, rows: _Counts) -> Metric:
    labels = [*WORKER, series.label] if series.label else WORKER
    metric = CounterMetricFamily(series.name, series.help, labels=labels)
    for names, counts in rows:
        for counter, value in series.counters.items() if names[1] in series.roles else ():
            metric.add_metric([*names, value] if series.label else names, bounded(counts.get(counter, 0)))
    return metric


def _by_reason(name: str, help_: str, prefix: str, rows: _Counts) -> Metric:
    metric = CounterMetricFamily(name, help_, labels=[*WORKER, "reason"])
    for names, counts in rows:
        for counter, count in counts.items():
            if counter.startswith(prefix) and EVENT.fullmatch(counter):
                metric.add_metric([*names, counter.removeprefix(prefix)], bounded(count))
    return metric


def _steps(rows: _Counts) -> Metric:
    metric = HistogramMetricFamily("trine_worker_step_seconds", "Forward passes, by their time", labels=WORKER)
    bounds = [(str(ms), str(ms / 1e3)) for ms in STEP_MS] + [("inf", "+Inf")]
    for names, counts in rows:
        if "step_ms" in counts:
            sums = accumulate(bounded(counts.get(f"step_le_{of}", 0)) for of, _ in bounds)
            buckets = [(bound, float(count)) for (_, bound), count in zip(bounds, sums, strict=True)]
            metric.add_metric(names, buckets, bounded(counts["step_ms"]) / 1e3)
    return metric


def _events(rows: _Counts) -> Metric:
    metric = CounterMetricFamily("trine_worker_events", "Its other counts", labels=[*WORKER, "event"])
    for names, counts in rows:
        for event, count in counts.items():
            if event in _KNOWN or event.startswith(tuple(BY_REASON)) or STEP.fullmatch(event):
                continue
            if EVENT.fullmatch(event):
                metric.add_metric([*names, event], bounded(count))
    return metric
