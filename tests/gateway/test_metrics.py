"""Metrics of a fleet at work, under names that the dashboard asks for: each of its queries is parsed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.fleet import Fleet
from services.gateway.metrics import Metrics
from shared.bus.base import Incoming
from shared.codec import decode, encode
from shared.messages import Beat, Load
from shared.subjects import Subjects
from shared.telemetry import STEP_MS
from tests.fake_engine import FakeEngine
from tests.fleet_rig import MODEL, FleetRig
from tests.gateway_rig import GatewayRig, eventually, gateway_on

pytestmark = pytest.mark.anyio
FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
DASHBOARD = json.loads((FOLDER / "trine.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
Samples = dict[str, list[tuple[dict[str, str], float]]]
"""By a sample's name."""


def samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@pytest.fixture(scope="module")
async def told(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[FleetRig, GatewayRig, Samples]]:
    """After some work, some of it in vain."""
    host: dict[str, Any] = {"host_cache_mb": 16, "host_cache_dir": str(tmp_path_factory.mktemp("host") / "tier")}
    async with FleetRig() as fleet:
        await fleet.decode(engine=FakeEngine(blocks=128), draft_adaptive=False, **host)
        await fleet.prefill(**host)
        await fleet.drafter()
        async with gateway_on(fleet) as rig:
            prompt = list(range(60))
            for field in ({}, {}, {"logit_bias": {"5000": 1}}, {"model": "none"}):
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 30, **field}
                await rig.http.post("/v1/completions", json=body)
            queue = f'trine_queue_waiting_prefill_jobs{{model="{MODEL}"}} 0.0'

            def complete() -> bool:
                text = rig.gateway.metrics.render().decode()
                return queue in text and "rejected_total{" in text and "finished_total{" in text

            await eventually(complete)
            await rig.hears(fleet)
            yield fleet, rig, samples((await rig.http.get("/metrics")).text)


def value(told: Samples, name: str, **labels: str) -> float:
    (found,) = [v for has, v in told[name] if has | labels == has]
    return found


async def test_what_a_fleet_tells(told: tuple[FleetRig, GatewayRig, Samples]) -> None:
    _, _, found = told
    decode, prefill = {"role": "decode", "worker": "decode-1"}, {"role": "prefill", "worker": "prefill-1"}
    assert value(found, "trine_queue_waiting_requests", model=MODEL, priority="normal") == 0
    assert value(found, "trine_worker_blocks", **decode) == 128
    assert value(found, "trine_worker_cached_blocks", **decode) >= 14
    assert value(found, "trine_worker_prompt_tokens_total", **decode) == 120
    assert value(found, "trine_worker_generated_tokens_total", **decode) == 60
    assert value(found, "trine_worker_prefill_tokens_total", **prefill, source="computed") == 56
    assert value(found, "trine_worker_prefill_tokens_total", **decode, source="computed") >= 4
    assert value(found, "trine_worker_prefill_tokens_total", **decode, source="cached") == 56
    assert value(found, "trine_cache_hit_blocks_total", **decode, tier="pool") == 14, "publishing hits nothing"
    assert sum(read for has, read in found["trine_cache_read_bytes_total"] if has | decode == has) == 14 * 16
    assert value(found, "trine_cache_stored_bytes", **decode, tier="host") >= 14 * 16
    assert value(found, "trine_cache_stored_bytes", **prefill, tier="pool") == 14 * 16
    assert value(found, "trine_prefill_jobs_total", **decode, outcome="published") == 1
    assert value(found, "trine_prefill_jobs_total", **prefill, outcome="done") == 1
    assert value(found, "trine_worker_requests_finished_total", **decode, reason="length") == 2
    assert value(found, "trine_worker_requests_rejected_total", **decode, reason="invalid_field") == 1
    assert value(found, "trine_worker_preemptions_total", **decode) == 0
    assert value(found, "trine_worker_drafted_tokens_total", **decode) > 0
    steps = value(found, "trine_worker_step_seconds_count", **decode)
    assert steps == value(found, "trine_worker_step_seconds_bucket", **decode, le="+Inf") > 0
    assert value(found, "trine_requests_total", model=MODEL, outcome="ok") == 2
    assert value(found, "trine_requests_total", model="", outcome="model_not_found") == 1
    assert value(found, "trine_nats_reconnects_total", role="gateway") == 0


def known(found: Samples, name: str) -> set[str]:
    """The labels that a metric has."""
    return {label for labels, _ in found[name] for label in labels}


def parts(node: Any) -> Iterator[Any]:
    """Of a parsed query, all."""
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if (below := getattr(node, name, None)) is not None:
            yield from parts(below)
    for argument in getattr(node, "args", None) or ():
        yield from parts(argument)


SELDOM = {
    "trine_worker_requests_failed_total": {"model", "role", "worker", "reason"},
}
"""What a fleet that is well does not tell; `test_what_went_wrong` does."""


@pytest.mark.parametrize(("title", "expr"), QUERIES, ids=[f"{title}-{i}" for i, (title, _) in enumerate(QUERIES)])
async def test_the_dashboard_asks_for_what_is_told(
    told: tuple[FleetRig, GatewayRig, Samples], title: str, expr: str
) -> None:
    found = {**told[2], **{name: [(dict.fromkeys(labels, ""), 0.0)] for name, labels in SELDOM.items()}}
    query = promql_parser.parse(expr.replace("$__rate_interval", "5m").replace("$model", ".*"))
    named = {node.name for node in parts(query) if isinstance(node, promql_parser.VectorSelector)}
    assert named and all(name and name.startswith("trine_") for name in named)
    for node in parts(query):
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name and node.name in found, f"no such metric: {node.name}"
            for matcher in node.matchers.matchers:
                assert matcher.name in known(found, node.name), f"{node.name} has no {matcher.name}"
                if matcher.op == promql_parser.MatchOp.Equal:
                    told_values = {labels.get(matcher.name) for labels, _ in found[node.name]}
                    assert matcher.value in told_values, f"{node.name} has no {matcher.name}={matcher.value}"
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            below = [str(n.name) for n in parts(node.expr) if isinstance(n, promql_parser.VectorSelector)]
            assert all(set(node.modifier.labels) <= known(found, name) for name in below), title
        elif isinstance(node, promql_parser.Call) and node.func.name in ("rate", "increase"):
            (name,) = [str(n.name) for n in parts(node) if isinstance(n, promql_parser.VectorSelector)]
            assert re.search("_(total|bucket|count|sum)$", name), "only of counters"


def test_sums_over_workers_count_each_once() -> None:
    """Every gateway tells of every worker."""
    for title, expr in QUERIES:
        for name in re.findall(r"trine_(?:worker|cache|prefill|nats)_\w+", expr):
            before = expr[: expr.index(name)]
            assert re.search(r"max( by \([^)]*\))? \((rate|increase)?\(?$|max\((rate)?\(?$", before), title


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time", "refresh", "annotations"} <= set(DASHBOARD)
    identities = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(identities)) == len(identities)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        assert panel["type"] == "timeseries" and panel["datasource"] == chosen and panel["fieldConfig"]["defaults"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        assert all(target["datasource"] == chosen and target["legendFormat"] for target in panel["targets"])
    variables: Mapping[str, Any] = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert set(variables) == {"datasource", "model"}
    assert set(re.findall(r"\$(\w+)", json.dumps(QUERIES))) == {"model", "__rate_interval"}


def test_the_scrape_example_asks_the_gateway() -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert (job["metrics_path"], job["static_configs"]) == ("/metrics", [{"targets": ["127.0.0.1:8000"]}])


def heard(*beats: Beat) -> Samples:
    fleet = Fleet(60.0)
    for beat in beats:
        fleet.hear(Incoming(Subjects("m").beat(beat.role, beat.worker), encode(beat)), time.monotonic())
    return samples(Metrics(fleet, "gateway-1", dict).render().decode())


def test_what_went_wrong() -> None:
    counters = {"failed_poison": 2, "refused_overloaded": 3, "redeliveries": 4, "denied": 5, "odd": 6}
    found = heard(Beat(role="decode", worker="d", counters=counters))
    assert value(found, "trine_worker_requests_failed_total", reason="poison") == 2
    assert value(found, "trine_worker_requests_rejected_total", reason="overloaded") == 3
    assert value(found, "trine_worker_redeliveries_total") == 4
    assert value(found, "trine_nats_errors_total", role="decode", kind="denied") == 5
    assert [labels["event"] for labels, _ in found["trine_worker_events_total"]] == ["odd"]
    for name, labels in SELDOM.items():
        assert known(found, name) == labels


def test_hostile_beats_neither_break_nor_swell_it() -> None:
    """On an open server anybody may beat."""
    wild = {"step_ms": -5, "step_le_5": 2**62, "x" * 128: 1, 'a"}\n': 2, "failed_a b": 3, "ok": -1}
    load = Load(queued={"decode-high": 7, "what ever": 9})
    found = heard(Beat(role="decode", worker='w"\n}', counters=wild, load=load))
    assert value(found, "trine_worker_step_seconds_sum", worker='w"\n}') == 0
    assert value(found, "trine_queue_waiting_requests", priority="high") == 7
    assert [labels["event"] for labels, _ in found["trine_worker_events_total"]] == ["ok"]
    assert found["trine_worker_events_total"][0][1] == 0


def test_workers_of_other_versions_hear_each_other() -> None:
    """A beat may have fields that this version does not know, and lack those that it does."""
    beat = Beat(role="prefill", worker="p", load=Load(blocks=9, queued={"prefill": 2}))
    told = msgpack.unpackb(encode(beat))
    later = {**told, "mood": "good", "load": {**told["load"], "joules": 7}}
    assert decode(msgpack.packb(later), Beat) == beat
    earlier = {**told, "load": {"running": 1, "waiting": 0, "free_blocks": 3}}
    assert decode(msgpack.packb(earlier), Beat).load == Load(running=1, free_blocks=3)


def test_steps_are_counted_by_their_time() -> None:
    counters = {"step_ms": 70, "step_le_5": 3, "step_le_50": 1, "step_le_inf": 2}
    found = heard(Beat(role="decode", worker="d", counters=counters))
    counts = {labels["le"]: v for labels, v in found["trine_worker_step_seconds_bucket"]}
    assert (counts["0.005"], counts["0.025"], counts["0.05"], counts["2.5"], counts["+Inf"]) == (3, 3, 4, 4, 6)
    assert len(counts) == len(STEP_MS) + 1
    assert value(found, "trine_worker_step_seconds_sum") == 0.07
