"""Answers of a given form through the official `openai` package: a small model with random weights, and a drafter.

Such a model says nothing of itself that makes sense, so whatever is well-formed is so because of the grammar.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from shared.engine.engine import Engine
from shared.sampling.grammars import Grammars
from tests import tiny_models
from tests.fleet_rig import MODEL, FleetRig
from tests.gateway_rig import GatewayRig, gateway_on
from tests.letters import EOS, TABLE, Letters

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK: Any = [{"role": "user", "content": "Who?"}]


class Fox(BaseModel):
    name: Annotated[str, Field(max_length=6)]
    colour: Literal["red", "white"]
    age: Annotated[int, Field(ge=0, le=99)]


class GetWeather(BaseModel):
    city: Annotated[str, Field(max_length=6)]
    days: Annotated[int, Field(ge=1, le=9)]


SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "fox", "schema": Fox.model_json_schema()}}
TOOL: Any = {"type": "function", "function": {"name": "GetWeather", "parameters": GetWeather.model_json_schema()}}


@pytest.fixture(scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayRig]:
    folder = tiny_models.write(tmp_path_factory.mktemp("llama"), tiny_models.ARCHITECTURES["llama"])

    def engine() -> Engine:
        return Engine.load(folder, block_size=4, kv_blocks=1024)

    async with FleetRig() as fleet:
        fleet.tokenizer = Letters()  # type: ignore[assignment]
        fleet.guides = Grammars(TABLE, tiny_models.VOCAB, {EOS})
        await fleet.decode(engine=engine(), max_running=16, draft_adaptive=False)
        await fleet.drafter(engine=engine(), draft_source="suffix")
        async with gateway_on(fleet, peer_timeout_s=10.0, read_s=20.0, keepalive_s=60.0) as rig:
            rig.http.timeout = 60
            yield rig


@pytest.fixture
async def client(rig: GatewayRig) -> AsyncIterator[AsyncOpenAI]:
    async with rig.openai() as client:
        yield client.with_options(timeout=60)


async def test_a_pydantic_model(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Fox, seed=1, max_tokens=150)
    (choice,) = answer.choices
    assert isinstance(choice.message.parsed, Fox) and choice.finish_reason == "stop"
    async with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=Fox, seed=1, max_tokens=150
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == choice.message.parsed and "content.done" in kinds


async def test_sixteen_at_once_with_a_drafter(client: AsyncOpenAI) -> None:
    """Case 48."""
    ask: Any = {"model": MODEL, "messages": ASK, "response_format": SCHEMA, "max_tokens": 150}
    answers = await asyncio.gather(*[client.chat.completions.create(**ask, seed=seed) for seed in range(16)])
    for answer in answers:
        assert answer.choices[0].finish_reason == "stop"
        assert list(json.loads(answer.choices[0].message.content)) == ["name", "colour", "age"]
        Fox.model_validate_json(answer.choices[0].message.content)
    assert len({answer.choices[0].message.content for answer in answers}) > 8
    assert sum(answer.usage.completion_tokens_details.accepted_prediction_tokens for answer in answers) > 16


@pytest.mark.parametrize("form", [SCHEMA, None])
async def test_several_choices_with_a_drafter(client: AsyncOpenAI, form: Any) -> None:
    """Case 98: three indices, differing texts, the same again with the same seed, streamed and not; usage summed."""
    ask: Any = {"model": MODEL, "messages": ASK, "n": 3, "seed": 5, "max_tokens": 150 if form else 20}
    ask |= {"response_format": form} if form else {}
    whole = await client.chat.completions.create(**ask)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and len(set(texts)) == 3
    streamed, usage = ["", "", ""], None
    ask_stream: Any = {**ask, "stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.chat.completions.create(**ask_stream):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    one = await client.chat.completions.create(**{**ask, "n": 1})
    assert streamed == texts and one.choices[0].message.content == texts[0]
    assert whole.usage and usage and usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens == one.usage.prompt_tokens  # once, though it was computed for each
    if form:
        for text in texts:
            Fox.model_validate_json(text or "")


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "[ab]c"}, {"ac", "bc"}),
        ({"guided_grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
        ({"guided_json": {"enum": ["p", "q"]}}, {'"p"', '"q"'}),
        ({"guided_json": '{"enum": [1, 2]}'}, {"1", "2"}),
        ({"structured_outputs": {"choice": ["yes", "no"], "regex": None}}, {"yes", "no"}),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, {"1", "2"}),
        ({"response_format": SCHEMA}, None),
        ({"response_format": {"type": "json_object"}, "max_tokens": 1}, {"{", '{"'}),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_every_form_in_both_apis(rig: GatewayRig, path: str, fields: dict[str, Any], accepted: Any) -> None:
    prompt = {"messages": ASK} if path == CHAT else {"prompt": "Who?"}
    answer = await rig.http.post(path, json={"model": MODEL, "max_tokens": 150, **prompt, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    if accepted is None:
        Fox.model_validate_json(text)
    else:
        assert text in accepted


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "GetWeather"}}])
async def test_a_call_that_has_to_be(client: AsyncOpenAI, choice: Any) -> None:
    ask: Any = {"model": MODEL, "messages": ASK, "tools": [TOOL], "tool_choice": choice, "seed": 3, "max_tokens": 200}
    whole = (await client.chat.completions.create(**ask, parallel_tool_calls=False)).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls
    assert call.function.name == "GetWeather"
    GetWeather.model_validate_json(call.function.arguments)
    pieces = await client.chat.completions.create(**ask, parallel_tool_calls=False, stream=True)
    deltas = [call async for chunk in pieces for call in chunk.choices[0].delta.tool_calls or []]
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments


async def test_strict_tools_are_parsed(client: AsyncOpenAI) -> None:
    tools = [pydantic_function_tool(GetWeather)]
    answer = await client.chat.completions.parse(
        model=MODEL, messages=ASK, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


async def test_an_answer_that_does_not_end(client: AsyncOpenAI) -> None:
    bias: Any = {str(EOS): 100}
    ask: Any = {"model": MODEL, "prompt": "Who?", "max_tokens": 12, "logit_bias": bias}
    ended = await client.completions.create(**ask)
    assert ended.choices[0].finish_reason == "stop" and ended.usage and ended.usage.completion_tokens == 1
    ignored = await client.completions.create(**ask, extra_body={"ignore_eos": True})
    assert ignored.choices[0].finish_reason == "length" and ignored.usage and ignored.usage.completion_tokens == 12


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


PATH = "response_format.json_schema"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, PATH),
    ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, f"{PATH}.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, f"{PATH}.schema"),
    (named({}, strict=1), f"{PATH}.strict"),
    (named({"type": "no such type"}), f"{PATH}.schema"),
    (named({"$ref": "https://example.org/x.json"}), f"{PATH}.schema"),
    (named({"x": [0] * 5000}), f"{PATH}.schema"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": "ab"}, "guided_choice"),
    ({"guided_grammar": "root ::="}, "guided_grammar"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "5"}, "guided_json"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", **named({})}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no such type"}}}],
      "tool_choice": "required"}, "tools"),
]  # fmt: skip


async def test_what_is_no_form(rig: GatewayRig) -> None:
    """Cases 88, 94: by name and with a status of its own, streamed or not."""
    for number, (fields, param) in enumerate(REFUSED):
        body = {"model": MODEL, "messages": ASK, "stream": bool(number % 2), **fields}
        answer = await rig.http.post(CHAT, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (fields, answer.text)
        assert "guided." not in answer.json()["error"]["message"]
