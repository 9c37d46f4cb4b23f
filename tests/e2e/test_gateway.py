"""The gateway before the default model's real weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from services.gateway.config import GatewaySettings
from services.gateway.gateway import Gateway
from services.gateway.server import GatewayServer
from tests.gateway_rig import eventually
from trine.supervisor import Fleet

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(200)]


class City(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    continent: Literal["Africa", "America", "Asia", "Australia", "Europe"]
    capital: bool


CITIES = ["Paris", "Lima", "Cairo", "Oslo", "Sydney", "Tokyo", "Rome", "Boston"]


@pytest.fixture
async def client(stack: Fleet) -> AsyncIterator[AsyncOpenAI]:
    gateway = Gateway(GatewaySettings(nats_url=stack.url, model_name=stack.model, port=0))
    server = GatewayServer(gateway)
    running = asyncio.create_task(server.serve())
    await eventually(lambda: server.started and gateway.trouble() is None, 20)
    async with AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
    server.should_exit = True
    await asyncio.wait_for(running, 20)


async def test_sixteen_forms_at_once_with_the_drafter(stack: Fleet, client: AsyncOpenAI) -> None:
    """Cases 48, 111, 112: all valid; a model without tools says so, and its template's control tokens are its own."""

    async def asked(number: int) -> Any:
        messages: Any = [{"role": "user", "content": f"Describe the city {CITIES[number % 8]} in JSON."}]
        return await client.chat.completions.parse(
            model=stack.model, messages=messages, response_format=City, max_tokens=80, seed=number, temperature=0.7
        )

    answers = await asyncio.gather(*[asked(number) for number in range(16)])
    assert all(isinstance(answer.choices[0].message.parsed, City) for answer in answers)
    assert all(answer.choices[0].finish_reason == "stop" for answer in answers)
    assert sum(answer.usage.completion_tokens_details.accepted_prediction_tokens for answer in answers) > 0
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    ask: Any = {"model": stack.model, "messages": [{"role": "user", "content": "Look!"}], "max_tokens": 2}
    with pytest.raises(openai.BadRequestError) as told:
        await client.chat.completions.create(**ask, tools=[tool])
    assert told.value.param == "tools"
    assert (await client.chat.completions.create(**ask, tools=[tool], tool_choice="none")).choices
