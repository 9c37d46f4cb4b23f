"""The official `openai` package against a gateway and a fleet: what answers look like, whole and in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL, FleetRig
from tests.gateway_rig import GatewayRig, events, gateway_on

pytestmark = pytest.mark.anyio
PROMPT = "11 22 33 44 55 66 77 88 99"
CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]


def text(count: int, prompt: str = PROMPT) -> str:
    return "".join(f"{token} " for token in completion([int(word) for word in prompt.split()], count))


@pytest.fixture(scope="module")
async def rig() -> AsyncIterator[GatewayRig]:
    async with FleetRig() as fleet:
        await fleet.decode(engine=FakeEngine(blocks=256))
        async with gateway_on(fleet) as rig:
            yield rig


@pytest.fixture
async def client(rig: GatewayRig) -> AsyncIterator[AsyncOpenAI]:
    async with rig.openai() as client:
        yield client


async def test_a_chat(client: AsyncOpenAI) -> None:
    answers = [await client.chat.completions.create(model=MODEL, messages=CHAT, max_completion_tokens=9) for _ in "ab"]
    for answer in answers:
        assert answer.id.startswith("chatcmpl-") and answer.model == MODEL and answer.object == "chat.completion"
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", text(9))
        assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answers[0].id != answers[1].id
    usage = answers[1].usage
    assert usage and (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, 9, 18)
    assert usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens == 8
    details = usage.completion_tokens_details
    assert details and (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


async def test_streaming_chunks_have_the_schema_that_clients_rely_on(client: AsyncOpenAI) -> None:
    """Case 89."""
    stream = await client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=9, stream=True)
    chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
    assert {(c.id, c.created, c.model, c.object) for c in chunks} == {
        (chunks[0].id, chunks[0].created, MODEL, "chat.completion.chunk")
    }
    assert all(len(c.choices) == 1 for c in chunks)  # no usage unasked
    first, *middle, last = [c.choices[0] for c in chunks]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert all(c.delta.role is None and c.finish_reason is None and c.delta.content for c in middle)
    assert (last.finish_reason, last.delta.content) == ("length", None)
    assert "".join(c.delta.content or "" for c in middle) == text(9)


async def test_the_streaming_helper_and_usage(client: AsyncOpenAI) -> None:
    """Case 86: one last chunk without choices."""
    options: Any = {"include_usage": True}
    stop = text(8).split()[-1]  # the helper takes an answer that was cut short for an error
    async with client.chat.completions.stream(
        model=MODEL, messages=CHAT, max_tokens=20, stop=stop, stream_options=options
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == text(7)
    assert final.choices[0].finish_reason == "stop"
    assert final.usage and final.usage.completion_tokens == 8
    assert "content.delta" in kinds and kinds.count("content.done") == 1


async def test_the_wire_ends_with_usage_and_done(rig: GatewayRig) -> None:
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response = await rig.http.post("/v1/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = events(response.text)
    assert [data for _, data in found].count("[DONE]") == 1 and found[-1][1] == "[DONE]"
    assert found[-2][1]["choices"] == [] and found[-2][1]["usage"]["completion_tokens"] == 3
    assert all(data["usage"] is None for _, data in found[:-2])
    assert found[-2][0].startswith("cmpl-") and found[-2][0].endswith(f":3.{len(text(3))}")


@pytest.mark.parametrize("prompt", [PROMPT, [11, 22, 33, 44, 55, 66, 77, 88, 99]])
async def test_texts_and_token_ids_complete_alike(client: AsyncOpenAI, prompt: Any) -> None:
    answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=5)
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion",
        text(5),
        "length",
    )


async def test_several_prompts(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=["1 2 3", "4 5"], n=2, max_tokens=4)
    assert [c.text for c in answer.choices] == [text(4, "1 2 3")] * 2 + [text(4, "4 5")] * 2
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 16)


async def test_parts_are_the_text_that_they_make_up(client: AsyncOpenAI) -> None:
    """Case 97."""
    parts: Any = [{"type": "text", "text": "11 22 33 "}, {"type": "text", "text": "44 55 66 77 88 99"}]
    messages: list[Any] = [{"role": "developer", "content": parts}]
    answer = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    assert answer.choices[0].message.content == text(4)
    assert answer.usage and answer.usage.prompt_tokens == 9


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_not_shown(client: AsyncOpenAI, stream: bool) -> None:
    """Cases 85, 37."""
    words = text(8).split()
    stop, before = f"{words[4]} {words[5]}", " ".join(words[:4]) + " "
    made: Any = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, stop=[stop], stream=stream)
    pieces = [c.choices[0] async for c in made] if stream else [made.choices[0]]
    assert "".join(p.text for p in pieces) == before
    assert pieces[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_chat(client: AsyncOpenAI, stream: bool) -> None:
    """Case 96. Without the tokenizer's file, a token's text tells its id."""
    made: Any = await client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=6, logprobs=True, top_logprobs=2, stream=stream
    )
    choices = [c.choices[0] async for c in made] if stream else [made.choices[0]]
    found = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    ids = [int(word) for word in text(6).split()]
    assert [t.token for t in found] == [f"token_id:{i}" for i in ids]
    assert [t.logprob for t in found] == [-i / 1000 for i in ids]
    assert all(t.bytes is None for t in found)
    assert [[top.token for top in t.top_logprobs] for t in found] == [
        [f"token_id:{j}" for j in (i, i - 1)] for i in ids
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_completion(client: AsyncOpenAI, stream: bool) -> None:
    made: Any = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, logprobs=1, stream=stream)
    choices = [c.choices[0] async for c in made] if stream else [made.choices[0]]
    found = [c.logprobs for c in choices if c.logprobs]
    tokens = [token for logprobs in found for token in logprobs.tokens]
    assert tokens == [f"token_id:{word}" for word in text(5).split()]
    assert [len(lp.token_logprobs) for lp in found] == [len(lp.text_offset) for lp in found]
    assert all(token in tops for lp in found for token, tops in zip(lp.tokens, lp.top_logprobs, strict=True))


async def test_models(client: AsyncOpenAI) -> None:
    """Case 93: exactly what is accepted."""
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "trine"
    with pytest.raises(openai.NotFoundError, match=f"no model 'nope' is served here; running: {MODEL}"):
        await client.models.retrieve("nope")


async def test_several_choices_have_seeds_of_their_own() -> None:
    """Case 98."""
    async with FleetRig() as fleet:
        await fleet.decode(engine=FakeEngine(blocks=256, seeded=True))
        async with gateway_on(fleet) as rig, rig.openai() as client:
            ask: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 6, "seed": 5}
            three = await client.chat.completions.create(**ask, n=3)
            again = await client.chat.completions.create(**ask, n=3, stream=True)
            one = await client.chat.completions.create(**ask)
            unseeded = await client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=6, n=3)
            streamed = ["", "", ""]
            async for chunk in again:
                streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(texts)) == 3 and streamed == texts and one.choices[0].message.content == texts[0]
    assert len({choice.message.content for choice in unseeded.choices}) == 3
    assert three.usage and (three.usage.prompt_tokens, three.usage.completion_tokens) == (9, 18)
