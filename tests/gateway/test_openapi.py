"""The OpenAPI document against the gateway that gives it: requests made from it at random, and answers held to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import just
from pydantic import BaseModel
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.result import Ok

from services.gateway.shape_models import ChatCompletionChunk, TextCompletionChunk
from services.gateway.sse import HEADER
from shared.errors import ContextLengthExceeded
from shared.messages import ChatMessage, Tool
from tests.fake_engine import FakeEngine, FakeTokenizer
from tests.fleet_rig import MODEL, FleetRig
from tests.gateway_rig import GatewayRig, events, eventually, gateway_on
from trine import resume

pytestmark = pytest.mark.anyio
FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
CHECKED = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
]


class Bytes(FakeTokenizer):
    """Any text is its bytes, and tools are welcome."""

    def encode(self, text: str, *, limit: int | None = None) -> list[int]:
        ids = list(text.encode())
        if limit is not None and len(ids) > limit:
            raise ContextLengthExceeded(f"{len(ids)} tokens, but {limit} fit")
        return ids

    def chat(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Tool] | None = None, limit: int | None = None
    ) -> list[int]:
        return self.encode("".join(message.content or " " for message in messages), limit=limit)


@pytest.fixture(scope="module")
async def rig() -> AsyncIterator[GatewayRig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "KNOWN_S", 0.05)
        async with FleetRig() as fleet:
            fleet.tokenizer = Bytes()
            await fleet.decode(engine=FakeEngine(blocks=256))
            async with gateway_on(fleet, peer_timeout_s=10.0, read_s=20.0) as rig:
                yield rig


def fuzz(address: str, examples: int, number: int) -> dict[tuple[str, str, int], int]:
    """How often which operation was answered by which status."""
    seen: dict[tuple[str, str, int], int] = {}
    document = schemathesis.openapi.from_url(f"{address}/openapi.json")
    checks: Any = CHECKS.get_by_names(CHECKED)
    for found in document.get_all_operations():
        operation = cast("Ok[Any]", found).ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @seed(number)
            @settings(
                max_examples=examples if operation.method == "post" else 3,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode), right=just(mode is GenerationMode.POSITIVE))
            def ask(case: Case, right: bool) -> None:
                if isinstance(case.body, dict):
                    case.body = agreeing(case.body) if right else shorter(case.body)
                if right and case.method == "POST":
                    case.headers.pop(HEADER, None)  # no answer has such an id
                response = case.call(base_url=address)
                case.validate_response(response, checks=checks)
                if right and isinstance(case.body, dict):
                    assert response.status_code == 200 or excused(response.json()["error"]), (case.body, response.text)
                key = (case.method, case.path, response.status_code)
                seen[key] = seen.get(key, 0) + 1

            with contextlib.suppress(Unsatisfiable):  # nothing can be wrong with a request that has nothing in it
                ask()
    return seen


def shorter(body: dict[str, Any]) -> dict[str, Any]:
    """Of a model that there is, and not for long."""
    body = dict(body)
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    for name in ("max_tokens", "max_completion_tokens", "n"):
        if type(body.get(name)) is int and body[name] > 8:
            body[name] = body[name] % 8 + 1
    return body


def agreeing(body: dict[str, Any]) -> dict[str, Any]:
    """Without what contradicts something else in it: the document's schemas are of single fields."""
    body = {name: value for name, value in shorter(plain(body)).items() if value is not None}
    for name in ("max_completion_tokens", "min_tokens", "best_of", "tool_choice", "ignore_eos"):
        body.pop(name, None)
    body |= {"n": min(body.get("n", 1), 2), "max_tokens": 3}
    if body.get("tools"):
        body["tools"] = body["tools"][:1]
        body["parallel_tool_calls"] = True
    if not body.get("stream"):
        body.pop("stream_options", None)
    if body.get("logprobs") is not True and "messages" in body:
        body.pop("top_logprobs", None)
    for name in [name for name in FORMS if name in body][1 - bool(body.get("tools")) :]:
        del body[name]
    if body.get("logit_bias"):
        body["logit_bias"] = {str(index): bias for index, bias in enumerate(body["logit_bias"].values())}
    if isinstance(body.get("prompt"), list):
        body["prompt"] = [tokens(part) for part in body["prompt"][:4]]
    for message in body.get("messages", []):
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = "{}"
    return body


def tokens(part: Any) -> Any:
    if isinstance(part, list):
        return [token % 1000 for token in part]
    return part % 1000 if isinstance(part, int) else part


def plain(value: Any) -> Any:
    """To a JSON schema 7.0 is an integer. It is not to us."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def excused(error: dict[str, Any]) -> bool:
    """What no schema says: how long a text is in tokens or a number in digits, and whether a form can be compiled."""
    return error["code"] in ("context_length_exceeded", "bad_message") or str(error["param"]).startswith(FORMS)


async def test_the_gateway_keeps_to_its_document(rig: GatewayRig) -> None:
    await keeps_to_it(rig, 4, 7)


async def test_events_keep_to_it_too(rig: GatewayRig) -> None:
    """Case 89. What events have in them, OpenAPI has no word for: the document only names the shapes."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    common = {"model": MODEL, "n": 2, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    asks: list[tuple[str, dict[str, Any], type[BaseModel]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, ChatCompletionChunk),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2, "tools": tools},
            ChatCompletionChunk,
        ),
        ("/v1/completions", {"prompt": "x", "logprobs": 2}, TextCompletionChunk),
    ]
    for path, fields, shape in asks:
        found = events((await rig.http.post(path, json={**common, **fields})).text)
        assert found.pop()[1] == "[DONE]" and len(found) > 6
        for _, data in found:
            shape.model_validate(data)


@pytest.mark.slow
async def test_the_gateway_keeps_to_its_document_longer(rig: GatewayRig) -> None:
    await keeps_to_it(rig, 15, 8)


async def keeps_to_it(rig: GatewayRig, examples: int, number: int) -> None:
    seen = await asyncio.to_thread(fuzz, rig.server.address, examples, number)
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert seen.get(("POST", path, 200), 0) > examples // 3 and seen.get(("POST", path, 400)), seen
    await eventually(lambda: rig.running_answers == 0)
