"""What is refused: how, by which status, and that nothing else suffers from it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from shared.bus.memory import MemoryBroker
from tests.fake_engine import FakeEngine
from tests.fleet_rig import MODEL, FleetRig
from tests.gateway_rig import GatewayRig, events, eventually, gateway_on, said
from trine import resume

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEYS = {"acme": "acme-key-0123456789", "globex": "globex-key-0123456789"}


@pytest.fixture(scope="module")
async def rig() -> AsyncIterator[GatewayRig]:
    async with FleetRig() as fleet:
        await fleet.decode(engine=FakeEngine(blocks=64))
        async with gateway_on(fleet, max_body_bytes=100_000) as rig:
            yield rig
            assert rig.running_answers == 0
            answer = await rig.http.post(TEXT, json={"model": MODEL, "prompt": "1 2", "max_tokens": 3})
            assert answer.status_code == 200


def text_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "1 2 3", "max_tokens": 3, **fields}


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "1 2 3"}], "max_tokens": 3, **fields}


FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt": [1000]}, "prompt.0"),  # found by the worker
    (TEXT, {"prompt": [-1]}, "prompt.0"),
    (TEXT, {"prompt": [1, 2**40]}, "prompt.1"),
    (TEXT, {"prompt": [1.5]}, "prompt.0"),
    (TEXT, {"prompt": [True]}, "prompt.0"),
    (TEXT, {"prompt": [[1], []]}, "prompt.1"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": "\ud800"}, "prompt"),
    (TEXT, {"echo": True}, "echo"),
    (TEXT, {"suffix": "x"}, "suffix"),
    (TEXT, {"best_of": 2}, "best_of"),
    (TEXT, {"logprobs": 21}, "logprobs"),
    (TEXT, {"logprobs": True}, "logprobs"),
    (TEXT, {"logit_bias": {"1000": 1}}, "logit_bias.1000"),
    (TEXT, {"logit_bias": {"x": 1}}, "logit_bias"),
    (TEXT, {"n": 10**9}, "n"),
    (TEXT, {"n": 17}, "n"),
    (TEXT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"max_tokens": 10**30}, "max_tokens"),
    (TEXT, {"stop": ""}, "stop"),
    (TEXT, {"stop": [""]}, "stop"),
    (TEXT, {"stop": ["x"] * 17}, "stop"),
    (TEXT, {"temperature": "1"}, "temperature"),
    (TEXT, {"temperature": -1}, "temperature"),
    (TEXT, {"top_p": 0}, "top_p"),
    (TEXT, {"top_k": -2}, "top_k"),
    (TEXT, {"seed": 2**63}, "seed"),
    (TEXT, {"min_tokens": 4}, "min_tokens"),
    (TEXT, {"cache_salt": "x" * 257}, "cache_salt"),
    (TEXT, {"cache_salt": 123}, "cache_salt"),
    (TEXT, {"model": None}, "model"),
    (TEXT, {"no_such_field": 1}, "no_such_field"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "alien", "content": "1"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    (CHAT, {"messages": [{"role": "user", "content": "1", "x": 1}]}, "messages.0.x"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (TEXT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"max_completion_tokens": 4}, "max_completion_tokens"),
    (CHAT, {"store": True}, "store"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_fields(rig: GatewayRig, stream: bool) -> None:
    """Cases 88, 94–97, 100–108: a status before any event, and the field's name."""
    for path, fields, param in FIELDS:
        given = text_body(**fields) if path == TEXT else chat_body(**fields)
        response = await rig.http.post(path, content=json.dumps({**given, "stream": stream}))
        assert (response.status_code, response.headers["content-type"]) == (400, "application/json"), fields
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["param"] == param, (fields, error)
        assert error["type"] == "invalid_request_error" and len(error["message"]) < 400


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"temperature": None, "stop": None, "n": None, "logit_bias": None, "tools": None},
        {"response_format": {"type": "text"}, "tool_choice": "none"},
        {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0, "priority": -3},
        {"top_k": 9_999_999, "temperature": 1e-9, "priority": "low"},
    ],
)
async def test_what_changes_nothing_is_taken(rig: GatewayRig, fields: dict[str, Any]) -> None:
    assert (await rig.http.post(CHAT, json=chat_body(**fields))).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"model": NaN}',
        b'{"temperature": 1e999}',
        b'{"model": "a", "model": "b"}',
        b"[" * 50_000,
        b'{"a":' * 15_000,
        b'{"n": ' + b"1" * 5000 + b"}",
    ],
)
async def test_what_is_no_json_object(rig: GatewayRig, data: bytes) -> None:
    """Cases 92, 100, 114, 128."""
    response = await rig.http.post(CHAT, content=data)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "bad_message")


async def test_typed_errors_of_the_client(rig: GatewayRig) -> None:
    """Cases 92, 93, 95."""
    async with rig.openai() as client:
        with pytest.raises(openai.NotFoundError, match="no model 'nope' is served here; running: fake") as missing:
            await client.completions.create(model="nope", prompt="1")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model=MODEL, prompt=[1] * 512)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    for method, path, status in (("GET", "/nope", 404), ("DELETE", CHAT, 405), ("GET", CHAT, 405)):
        response = await rig.http.request(method, path)
        assert response.status_code == status and response.json()["error"]["type"] == "invalid_request_error"


async def test_bodies_that_are_too_large_or_too_slow(rig: GatewayRig) -> None:
    """Cases 115, 128."""
    large = await rig.http.post(TEXT, json=text_body(prompt="1 " * 60_000))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")

    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    part = b"186a0\r\n" + b" " * 100_000 + b"\r\n"
    assert await exchange(rig, head + b"transfer-encoding: chunked\r\n\r\n" + part + part, 413)
    assert await exchange(rig, head + b"content-length: 9\r\n\r\n{", 408)


async def exchange(rig: GatewayRig, data: bytes, status: int) -> bool:
    """Whether these bytes are answered with this status."""
    reader, writer = await rig.raw()
    writer.write(data)
    async with asyncio.timeout(5):
        line = await reader.readline()
        with contextlib.suppress(ConnectionResetError):
            while status >= 408 and await reader.read(1 << 16):
                pass  # nothing more is read from such a client
    writer.close()
    return line.startswith(b"HTTP/1.1 %d" % status)


async def test_headers(rig: GatewayRig) -> None:
    """Case 128."""
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    assert await exchange(rig, head + b"x: 1\r\n" * 50 + b"\r\n", 200)
    assert await exchange(rig, head + b"x: 1\r\n" * 10_000 + b"\r\n", 431)
    assert await exchange(rig, head + b"x: " + b"1" * 60_000 + b"\r\n\r\n", 431)
    assert await exchange(rig, b"GET /" + b"1" * 60_000 + b" HTTP/1.1\r\n\r\n", 431)
    assert await exchange(rig, b"rubbish\r\n\r\n", 400)
    reader, writer = await rig.raw()
    writer.write(b"GET / HTTP/1.1\r\nx: 1")
    for _ in range(10):  # one header without an end, a bit at a time
        await asyncio.sleep(0.005)
        writer.write(b"1" * 4096)
    assert (await reader.readline()).startswith(b"HTTP/1.1 431")
    slow, writer = await rig.raw()
    began = time.monotonic()
    writer.write(b"GET /health HTTP/1.1\r\nx")
    assert await slow.read() == b""
    assert 0.3 < time.monotonic() - began < 3


async def test_operations(rig: GatewayRig) -> None:
    """Metrics under the names that people know, an OpenAPI document, and no key for them."""
    assert (await rig.http.get("/ready")).json() == {"status": "ready", "models": [MODEL]}
    await rig.http.post(TEXT, json=text_body(n=2))
    await eventually(lambda: rig.running_answers == 0)
    found = (await rig.http.get("/metrics")).text
    for line in (
        'trine_requests_total{model="fake",outcome="ok"}',
        'trine_time_to_first_token_seconds_count{model="fake"}',
        'trine_inter_token_latency_seconds_count{model="fake"}',
        'trine_generation_tokens_total{model="fake"}',
        'trine_worker_up{model="fake",role="decode",worker="decode-1"} 1.0',
        "trine_requests_inflight 0.0",
    ):
        assert line in found
    paths = (await rig.http.get("/openapi.json")).json()["paths"]
    schema = paths[CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "messages"} == set(schema["required"])
    assert "top_logprobs" in schema["properties"]


class TestKeys:
    async def test_who_may_ask_and_as_whom(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resume, "KNOWN_S", 0.2)
        fleet = FleetRig()
        fleet.broker = MemoryBroker(authenticated=True)
        entries = ",".join(f"{tenant}:{key}" for tenant, key in KEYS.items())
        async with fleet:
            await fleet.decode(engine=FakeEngine(blocks=256))
            async with gateway_on(fleet, api_keys=entries) as rig:
                for key in ("none", "acme-key-012345678"):
                    refused = await rig.http.post(TEXT, json=text_body(), headers={"authorization": f"Bearer {key}"})
                    assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
                    assert key not in refused.text
                assert (await rig.http.get("/v1/models")).status_code == 401
                assert (await rig.http.get("/health")).status_code == 200
                with pytest.raises(openai.AuthenticationError):
                    await rig.openai("wrong-key-0123456789").models.list()
                cached = []
                for tenant in ("acme", "acme", "globex"):  # cases 3, 4
                    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
                    ask = text_body(prompt=" ".join("1234567890123"), cache_salt="s")
                    usage = (await rig.http.post(TEXT, json=ask, headers=headers)).json()["usage"]
                    cached.append(usage["prompt_tokens_details"]["cached_tokens"])
                assert cached[0] == 0 and cached[1] > 0 and cached[2] == 0
                mine = await rig.http.post(
                    TEXT, json=text_body(stream=True), headers={"authorization": f"Bearer {KEYS['acme']}"}
                )
                other = {"authorization": f"Bearer {KEYS['globex']}", "last-event-id": events(mine.text)[0][0]}
                assert said(events(mine.text))
                assert (await rig.http.get(TEXT, headers=other)).json()["error"]["code"] == "not_kept"

    async def test_how_much_one_key_may_ask_for(self) -> None:
        async with FleetRig() as fleet:
            await fleet.decode(engine=FakeEngine(blocks=256, step_s=0.02))
            limits = {"key_concurrency": 4, "key_rate": 0.01, "key_burst": 6}
            async with gateway_on(fleet, **limits) as rig:
                running = asyncio.create_task(rig.http.post(TEXT, json=text_body(n=3, max_tokens=20)))
                await eventually(lambda: rig.running_answers == 3)
                refused = await rig.http.post(TEXT, json=text_body(n=2))
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrency_limit_exceeded")
                assert (await running).status_code == 200
                assert (await rig.http.post(TEXT, json=text_body(n=3))).status_code == 200
                refused = await rig.http.post(TEXT, json=text_body())
                assert refused.json()["error"]["code"] == "rate_limit_exceeded"
                assert 90 <= int(refused.headers["retry-after"]) <= 100


async def test_a_full_queue_is_said_at_once() -> None:
    """Case 122."""
    async with FleetRig() as fleet:
        await fleet.decode(engine=FakeEngine(blocks=256, step_s=0.02), max_queued=2, max_running=1)
        async with gateway_on(fleet) as rig:
            began = time.monotonic()
            asks = [rig.http.post(TEXT, json=text_body(max_tokens=20)) for _ in range(20)]
            answers = await asyncio.gather(*asks)
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 503} and statuses.count(200) >= 2
    full = next(answer for answer in answers if answer.status_code == 503)
    assert full.json()["error"]["code"] == "overloaded" and full.headers["retry-after"]
    assert time.monotonic() - began < 5
