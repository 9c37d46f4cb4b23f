"""Tools through the official `openai` package: a model that says what the test wants, whole and in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from services.gateway import sse
from shared.messages import ChatMessage, Tool
from tests.fake_engine import FakeEngine, FakeTokenizer, completion
from tests.fleet_rig import MODEL, FleetRig
from tests.gateway_rig import GatewayRig, events, gateway_on

pytestmark = pytest.mark.anyio
PROMPT = [11, 22, 33, 44, 55]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK: Any = [{"role": "user", "content": "Weather in Paris?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class Scripted(FakeTokenizer):
    """Whatever the tokens are, the text is `script`, `CUT` characters a token."""

    script = ""
    told: tuple[Sequence[ChatMessage], Sequence[Tool] | None] = ((), None)

    def chat(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Tool] | None = None, limit: int | None = None
    ) -> list[int]:
        self.told = messages, tools
        return PROMPT

    def detokenizer(self) -> Any:
        return Voice(self.script)


class Voice:
    def __init__(self, script: str) -> None:
        self._left = script

    def push(self, token_id: int) -> str:
        said, self._left = self._left[:CUT], self._left[CUT:]
        return said

    def flush(self) -> str:
        return ""


CUT = 7
LENGTH = 31
"""Tokens of every answer: the last one is EOS."""
END = completion(PROMPT, LENGTH)[-1]
assert END not in completion(PROMPT, LENGTH)[:-1]


class Rig:
    def __init__(self, fleet: FleetRig, gateway: GatewayRig, client: AsyncOpenAI, voice: Scripted) -> None:
        self.fleet, self.gateway, self.client, self.voice = fleet, gateway, client, voice

    async def whole(self, script: str, **fields: Any) -> Any:
        self.voice.script = script
        given = {"model": MODEL, "messages": ASK, "tools": [WEATHER], "max_tokens": 100, **fields}
        return await self.client.chat.completions.create(**given)

    async def streamed(self, script: str, **fields: Any) -> list[Any]:
        return [chunk.choices[0] async for chunk in await self.whole(script, stream=True, **fields)]


@pytest.fixture(scope="module")
async def rig() -> AsyncIterator[Rig]:
    voice = Scripted()
    async with FleetRig() as fleet:
        fleet.tokenizer = voice
        await fleet.decode(engine=FakeEngine(blocks=256).with_eos(END))
        async with gateway_on(fleet, peer_timeout_s=10.0, read_s=20.0) as gateway, gateway.openai() as client:
            yield Rig(fleet, gateway, client, voice)


async def test_a_call(rig: Rig) -> None:
    answer = await rig.whole(f"I look it up.\n{CALL}\n{CALL}")
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look it up.\n")
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"] * 2
    assert all(json.loads(call.function.arguments) == {"city": "Paris"} for call in choice.message.tool_calls)
    assert len({call.id for call in choice.message.tool_calls}) == 2
    told = rig.voice.told
    assert told[1] and told[1][0].function.name == "get_weather" and told[0][0].content == "Weather in Paris?"


async def test_deltas(rig: Rig) -> None:
    """A call comes in one piece, and no chunk says of it what another one has said."""
    choices = await rig.streamed(f"I look it up.\n{CALL}\n{CALL}")
    first, *middle, last = choices
    assert (first.delta.role, first.delta.content, last.finish_reason) == ("assistant", None, "tool_calls")
    assert "".join(c.delta.content or "" for c in middle) == "I look it up.\n"
    deltas = [call for c in choices for call in c.delta.tool_calls or []]
    assert [(d.index, d.type, d.function.name) for d in deltas] == [
        (0, "function", "get_weather"),
        (1, "function", "get_weather"),
    ]
    assert all(d.id and json.loads(d.function.arguments) == {"city": "Paris"} for d in deltas)


async def test_the_streaming_helper(rig: Rig) -> None:
    rig.voice.script = CALL
    async with rig.client.chat.completions.stream(model=MODEL, messages=ASK, tools=[WEATHER], max_tokens=100) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    assert final.choices[0].finish_reason == "tool_calls" and not final.choices[0].message.content


@pytest.mark.parametrize(
    "script",
    [
        "Just text.",
        "",
        f"{CALL[:40]} and then no more",
        CALL.replace("get_weather", "other"),
        "<tool_call>{}</tool_call>",
    ],
)
async def test_what_is_no_call_is_content(rig: Rig, script: str) -> None:
    answer = await rig.whole(script)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", script, None)
    choices = await rig.streamed(script)
    assert "".join(c.delta.content or "" for c in choices) == script
    assert choices[-1].finish_reason == "stop" and all(c.delta.tool_calls is None for c in choices)


async def test_without_tools_text_is_text(rig: Rig) -> None:
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        answer = await rig.whole(CALL, **fields)
        assert answer.choices[0].message.content == CALL and rig.voice.told[1] is None


async def test_schemas_are_for_the_model_to_read(rig: Rig) -> None:
    """What grammar could not see to is fine as long as nobody asks that it does."""
    odd = {**WEATHER, "function": {**WEATHER["function"], "parameters": {"allOf": [{"not": {}}, {"format": "x"}]}}}
    assert (await rig.whole(CALL, tools=[odd])).choices[0].message.tool_calls
    with pytest.raises(openai.BadRequestError) as told:
        await rig.whole(CALL, tools=[odd], tool_choice="required")
    assert told.value.param == "tools"


async def test_one_call_at_most(rig: Rig) -> None:
    answer = await rig.whole(f"{CALL}{CALL}", parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", None)


async def test_cut_off(rig: Rig) -> None:
    """A call that the length cuts off is none; one that is complete stays one, and the reason is the length."""
    answer = await rig.whole(CALL, max_tokens=4)
    assert answer.choices[0].message.content == CALL[: 4 * CUT]
    assert answer.choices[0].finish_reason == "length"
    assert (await rig.whole(f"{CALL} And then", max_tokens=14)).choices[0].finish_reason == "length"


async def test_a_conversation_with_calls_and_results(rig: Rig) -> None:
    """Case 97: what the client was given goes back as it is, null content and all; each message arrives whole."""
    first = await rig.whole(CALL)
    message = first.choices[0].message
    assert message.content is None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "18 °C"}]}
    answer = await rig.whole("It is warm.", messages=[*ASK, message, result])
    assert answer.choices[0].message.content == "It is warm."
    _, called, told = rig.voice.told[0]
    assert called.content is None
    assert called.tool_calls and called.tool_calls[0].function.arguments == '{"city": "Paris"}'
    assert (told.role, told.content, told.tool_call_id) == ("tool", "18 °C", message.tool_calls[0].id)


async def test_several_choices(rig: Rig) -> None:
    answer = await rig.whole(CALL, n=2)
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert len(set(ids)) == 2 and {choice.finish_reason for choice in answer.choices} == {"tool_calls"}


async def test_logprobs_of_calls(rig: Rig) -> None:
    choices = await rig.streamed(CALL, logprobs=True)
    assert sum(len(c.logprobs.content) for c in choices if c.logprobs) == LENGTH


async def test_going_on(rig: Rig) -> None:
    """From any event on: the rest, with the same ids of calls."""
    rig.voice.script = f"One moment.{CALL}{CALL} Done."
    ask = {"model": MODEL, "messages": ASK, "tools": [WEATHER], "stream": True, "max_tokens": 100}
    whole = events((await rig.gateway.http.post("/v1/chat/completions", json=ask)).text)
    assert not deltas([event for event in whole if not event[0]]), "what has no id would be heard twice"
    cuts = [number for number, (event_id, _) in enumerate(whole) if event_id]
    rests = [
        rig.gateway.http.post("/v1/chat/completions", json=ask, headers={sse.HEADER: whole[number][0]})
        for number in cuts
    ]
    for number, rest in zip(cuts, await asyncio.gather(*rests), strict=True):
        assert deltas([*whole[: number + 1], *events(rest.text)]) == deltas(whole)
    assert deltas(whole).count("call_") == 2


def deltas(found: list[tuple[str, Any]]) -> str:
    """All that they say: how texts are cut into deltas is none of it."""
    said = ""
    for _, data in found:
        for choice in data["choices"] if data != "[DONE]" else []:
            delta = choice["delta"]
            said += (delta.get("content") or "") + "".join(map(json.dumps, delta.get("tool_calls", [])))
    return said


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": "x"}, "tools"),
    ({"tools": [WEATHER] * 129}, "tools"),
    ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools.0.function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]},
     "tools.0.function.description"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": "\ud800"}}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": 2**70}}}]},
     "tools.0.function.parameters"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [{"role": "tool", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]},
     "messages.0.tool_calls.0.function"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": "[]"}}]}]},
     "messages.0.tool_calls.0.function.arguments"),
]  # fmt: skip


async def test_refusals(rig: Rig) -> None:
    """Cases 88, 94, 97: by name, before any event."""
    for fields, param in REFUSED:
        body = {"model": MODEL, "messages": ASK, "tools": [WEATHER], "stream": True, **fields}
        answer = await rig.gateway.http.post("/v1/chat/completions", content=json.dumps(body))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (fields, answer.text)


async def test_a_model_that_has_no_tools_says_so() -> None:
    async with FleetRig() as fleet:
        await fleet.decode(engine=FakeEngine(blocks=64))
        async with gateway_on(fleet) as gateway, gateway.openai() as client:
            with pytest.raises(openai.BadRequestError, match="chat template has no place for them") as told:
                await client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER])
            assert told.value.param == "tools"
