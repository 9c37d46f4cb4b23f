"""One trace from whoever asks to the last worker that had to do with the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared import tracing
from shared.otel import OtelTracer
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL, FleetRig
from tests.gateway_rig import GatewayRig, eventually, gateway_on

pytestmark = pytest.mark.anyio
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PREFIX = list(range(100, 340))


@dataclass
class Traces:
    """Spans that ended, by trace."""

    exporter: InMemorySpanExporter

    def of(self, trace_id: str) -> list[ReadableSpan]:
        spans = self.exporter.get_finished_spans()
        return [span for span in spans if f"{span.context.trace_id:032x}" == trace_id]

    async def whole(self, trace_id: str, names: Iterable[str]) -> list[ReadableSpan]:
        """Once spans of these names have ended."""
        await eventually(lambda: {span.name for span in self.of(trace_id)} >= set(names))
        return self.of(trace_id)


@pytest.fixture(scope="module")
def traces() -> Iterator[Traces]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.install(OtelTracer(provider))
    yield Traces(exporter)
    tracing.install(None)


@pytest.fixture(scope="module")
async def rig(traces: Traces) -> AsyncIterator[tuple[FleetRig, GatewayRig]]:
    async with FleetRig() as fleet:
        await fleet.decode(local_prefill_tokens=8, draft_adaptive=False)
        await fleet.prefill()
        await fleet.drafter()
        async with gateway_on(fleet) as gateway:
            yield fleet, gateway


def family(spans: list[ReadableSpan]) -> dict[str, set[str]]:
    """By the name of each span: its parents' names, "" for one that is not of this process."""
    names = {span.context.span_id: span.name for span in spans if span.context}
    found: dict[str, set[str]] = {}
    for span in spans:
        parent = names.get(span.parent.span_id, "") if span.parent else "none"
        found.setdefault(span.name, set()).add(parent)
    return found


def attributes(spans: list[ReadableSpan], name: str) -> dict[str, Any]:
    return dict(next(span for span in spans if span.name == name).attributes or {})


async def test_http_to_the_drafter_is_one_trace(rig: tuple[FleetRig, GatewayRig], traces: Traces) -> None:
    prompt = list(range(700, 760))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 40}
    response = await rig[1].http.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert response.status_code == 200
    names = ("POST /v1/completions", f"serve {MODEL}", f"prefill {MODEL}", "draft", "ask for drafts")
    spans = await traces.whole(TRACE, names)
    client, serve, prefill = f"text_completion {MODEL}", f"serve {MODEL}", f"prefill {MODEL}"
    assert family(spans) == {
        "POST /v1/completions": {""},
        client: {"POST /v1/completions"},
        "queue": {client},
        serve: {client},
        "load": {serve, prefill},
        "await prefill": {"load"},
        prefill: {"await prefill"},
        "compute": {prefill},
        "transfer": {"await prefill"},
        "compute prompt": {serve},
        "decode": {serve},
        "ask for drafts": {"decode"},
        "draft": {"ask for drafts"},
    }
    (top,) = [span for span in spans if span.name == "POST /v1/completions"]
    assert top.parent and f"{top.parent.span_id:016x}" == PARENT and top.parent.is_remote
    asks = sum(span.name == "ask for drafts" for span in spans)
    assert 1 <= asks <= 8, "some of the asks, not each"

    usage = response.json()["usage"]
    told = attributes(spans, serve)
    assert told["gen_ai.request.model"] == MODEL and told["trine.worker"] == "decode-1"
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] == 60
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 40
    assert told["trine.prefill_workers"] == ("prefill-1",)
    assert attributes(spans, client)["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes(spans, prefill)["trine.tokens"] == 56
    for span in spans:
        assert span.start_time and span.end_time and span.end_time >= span.start_time
        assert "error.type" not in (span.attributes or {}), span.name


async def test_spans_tell_nothing_that_was_said(rig: tuple[FleetRig, GatewayRig], traces: Traces) -> None:
    traces.exporter.clear()
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "911 922 933"}], "max_tokens": 3}
    response = await rig[1].http.post("/v1/chat/completions", json=chat)
    assert response.status_code == 200
    await eventually(lambda: any(s.name.startswith("POST") for s in traces.exporter.get_finished_spans()))
    told = " ".join(span.to_json() for span in traces.exporter.get_finished_spans())
    said = response.json()["choices"][0]["message"]["content"].split()
    assert said == [str(token) for token in completion([911, 922, 933], 3)]
    assert not any(f'"{text}' in told or f" {text} " in told for text in ["911 922", *said])


@pytest.mark.parametrize("parent", ["", f"00-{TRACE}-{PARENT}-01-x", f"00-{'0' * 32}-{PARENT}-01", "x" * 5000])
async def test_what_is_no_traceparent_begins_a_trace(
    rig: tuple[FleetRig, GatewayRig], traces: Traces, parent: str
) -> None:
    traces.exporter.clear()
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 1}
    await rig[1].http.post("/v1/completions", json=body, headers={"traceparent": parent})
    await eventually(lambda: any(s.name.startswith("POST") for s in traces.exporter.get_finished_spans()))
    spans = traces.exporter.get_finished_spans()
    (top,) = [span for span in spans if span.name == "POST /v1/completions"]
    assert top.parent is None
    assert {span.context.trace_id for span in spans if span.context} == {top.context.trace_id}


async def test_what_a_caller_did_not_sample_is_not_recorded(rig: tuple[FleetRig, GatewayRig], traces: Traces) -> None:
    traces.exporter.clear()
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1}
    await rig[1].http.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    await asyncio.sleep(0.1)
    assert traces.exporter.get_finished_spans() == ()


async def test_errors_are_told(rig: tuple[FleetRig, GatewayRig], traces: Traces) -> None:
    traces.exporter.clear()
    body = {"model": MODEL, "prompt": [5] * 511 + [2] * 100, "max_tokens": 1}
    assert (await rig[1].http.post("/v1/completions", json=body)).status_code == 400
    names = {"POST /v1/completions", f"text_completion {MODEL}", f"serve {MODEL}"}
    await eventually(lambda: {s.name for s in traces.exporter.get_finished_spans()} >= names)
    for span in traces.exporter.get_finished_spans():
        wrong = (span.attributes or {}).get("error.type")
        assert wrong == ("context_length_exceeded" if span.name in names else None), span.name
        assert (span.status.status_code is trace.StatusCode.ERROR) == (wrong is not None)


async def test_a_request_that_changes_hands_stays_in_its_trace(traces: Traces) -> None:
    """Handed over to the holder of its prefix; and taken up by another worker after a death."""
    async with FleetRig() as fleet:
        slow: dict[str, Any] = {"engine": FakeEngine(blocks=256, step_s=0.02), "affinity": True}
        await fleet.decode("decode-1", **slow)
        await fleet.client().generate(token_ids=[*PREFIX, 1], max_tokens=1)
        await fleet.decode("decode-2", engine=FakeEngine(blocks=256, step_s=0.02))
        await asyncio.sleep(0.15)
        for number in range(20):
            trace_id = f"{number + 1:032x}"
            asked = fleet.client().generate(
                token_ids=[*PREFIX, 2 + number], max_tokens=2, traceparent=f"00-{trace_id}-{PARENT}-01"
            )
            answer = await asked
            spans = await traces.whole(trace_id, [f"serve {MODEL}", f"text_completion {MODEL}"])
            if any(span.name == "hand over" for span in spans):
                break
            await asyncio.sleep(0.1)
        client, serve = f"text_completion {MODEL}", f"serve {MODEL}"
        found = family(spans)
        assert found["hand over"] == {serve} and found[serve] == {client, "hand over"} and found[client] == {""}
        served = [span for span in spans if span.name == serve and (span.attributes or {})["trine.handed_over"]]
        assert [(span.attributes or {})["trine.worker"] for span in served] == [answer.served_by.decode]
        assert sum(span.name == "queue" for span in spans) == 1

        asked = fleet.client().generate(token_ids=[7, 8, 9], max_tokens=30, traceparent=f"00-{TRACE[::-1]}-{PARENT}-01")
        task = asyncio.create_task(asked)
        await eventually(lambda: any(worker.load().running for worker in fleet.workers.values()))
        await asyncio.sleep(0.1)
        await fleet.kill(next(name for name, worker in fleet.workers.items() if worker.load().running))
        assert list((await task).token_ids) == completion([7, 8, 9], 30)
        spans = await traces.whole(TRACE[::-1], [serve, client])
        (again,) = [s for s in spans if s.name == serve and (s.attributes or {})["trine.attempt"] == 2]
        (asking,) = [s for s in spans if s.name == client]
        assert again.parent and asking.context and again.parent.span_id == asking.context.span_id
