"""Each bad request gets its own typed error event on a real stack, and disturbs nobody."""

from __future__ import annotations

import asyncio
import json
import pickle  # the attack, never the remedy
from typing import Any

import nats
import pytest

from shared.errors import TooLarge, TrineError
from shared.subjects import Subjects
from trine.client import Client
from trine.supervisor import Fleet

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

BAD: dict[str, tuple[bytes, str]] = {
    "empty prompt": (b'{"id":"ID","prompt":""}', "empty_prompt"),
    "longer than the context": (b'{"id":"ID","prompt":"' + b"word " * 9000 + b'"}', "context_length_exceeded"),
    "unknown model": (b'{"id":"ID","prompt":"x","model":"nope"}', "unknown_model"),
    "temperature NaN": (b'{"id":"ID","prompt":"x","temperature":NaN}', "invalid_field"),
    "top_p 0": (b'{"id":"ID","prompt":"x","top_p":0}', "invalid_field"),
    "negative max_tokens": (b'{"id":"ID","prompt":"x","max_tokens":-1}', "invalid_field"),
    "token id out of range": (b'{"id":"ID","token_ids":[1,49152]}', "invalid_field"),
    "negative token id": (b'{"id":"ID","token_ids":[-1]}', "invalid_field"),
    "non-UTF-8": (b'{"id":"ID","prompt":"\xff\xfe"}', "bad_message"),
    "100k-deep JSON": (b'{"id":"ID","prompt":' + b"[" * 100_000, "bad_message"),
    "5 MB of text": (b'{"id":"ID","prompt":"' + b"x" * (5 << 20) + b'"}', "too_large"),
    "unknown field": (b'{"id":"ID","prompt":"x","best_of":3}', "invalid_field"),
    "version 9": (b'{"id":"ID","prompt":"x","v":9}', "unsupported_version"),
}


async def first_event(fleet: Fleet, subject: str, data: bytes) -> dict[str, Any]:
    connection = await nats.connect(fleet.url)
    try:
        subscription = await connection.subscribe(subject)
        await connection.publish(Subjects(fleet.model).request("normal"), data)
        message = await subscription.next_msg(timeout=20)
        event: dict[str, Any] = json.loads(message.data)
        with pytest.raises(nats.errors.TimeoutError):
            await subscription.next_msg(timeout=0.2)  # one event, not two
        return event
    finally:
        await connection.close()


@pytest.mark.parametrize("name", BAD)
async def test_typed_event(stack: Fleet, name: str) -> None:
    data, code = BAD[name]
    request_id = "bad-" + name.replace(" ", "-")
    event = await first_event(stack, Subjects(stack.model).events(request_id), data.replace(b"ID", request_id.encode()))
    assert (event["type"], event["code"]) == ("failed", code)
    assert event["id"] == request_id


async def test_a_pickle_is_refused_where_no_id_can_be_read(stack: Fleet) -> None:
    event = await first_event(stack, Subjects(stack.model).refused(), pickle.dumps({"id": "x", "prompt": "y"}))
    assert (event["type"], event["code"]) == ("failed", "bad_message")


async def test_20_mb_of_text_never_leaves_the_client(stack: Fleet) -> None:
    async with Client(stack.url, stack.model) as client:
        with pytest.raises(TooLarge):
            await client.generate("x" * (20 << 20))


async def test_neighbours_are_not_disturbed(stack: Fleet) -> None:
    pids = stack.pids()
    async with Client(stack.url, stack.model) as client:
        calm = await client.generate("The three primary colours are", max_tokens=40, temperature=0)
        task = asyncio.create_task(client.generate("The three primary colours are", max_tokens=40, temperature=0))
        connection = await nats.connect(stack.url)
        for data, _ in BAD.values():
            await connection.publish(Subjects(stack.model).request("normal"), data.replace(b"ID", b"noise"))
        await connection.flush()
        await connection.close()
        assert (await task).token_ids == calm.token_ids
    assert stack.pids() == pids


async def test_an_unknown_model_is_named_with_those_that_exist(stack: Fleet) -> None:
    async with Client(stack.url, "nope") as client:
        with pytest.raises(TrineError) as caught:
            await client.generate("x")
        assert caught.value.code == "unknown_model"
        assert stack.model in caught.value.message
