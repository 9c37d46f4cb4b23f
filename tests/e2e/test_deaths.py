"""Real processes on a real nats-server, killed without warning: every request ends right or with one clear error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from shared.errors import TrineError
from shared.messages import ChatMessage
from shared.tokenizer import Tokenizer
from tests.e2e.gold import Gold, check
from tests.e2e.prompts import PROMPTS
from trine.client import Client
from trine.stream import Stream
from trine.supervisor import Fleet

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]
CONTEXT = " ".join(f"Item {n}: the box on shelf {n % 7} holds {n * 3} bolts." for n in range(40))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet({"prefill": 1, "decode": 2, "drafter": 1}, env={"TRINE_LOG_FORMAT": "json"}) as fleet:
        fleet.wait_ready(120)
        yield fleet


async def consume(stream: Stream) -> list[int]:
    tokens: list[int] = []
    async for delta in stream:
        assert delta.index == len(tokens), "a token is missing or doubled"
        tokens += delta.token_ids
    return tokens


async def run(
    fleet: Fleet, gold: Gold, tokenizer: Tokenizer, victim: str, *, after_s: float, context: str = ""
) -> None:
    """Six requests, a SIGKILL while they run; all end with the reference's text."""
    prompts = [f"{context}{p}" for p in PROMPTS[:6]]
    async with Client(fleet.url, fleet.model) as client:
        streams = [
            client.stream(messages=[{"role": "user", "content": p}], max_tokens=40, temperature=0, deadline_ms=120_000)
            for p in prompts
        ]
        tasks = [asyncio.create_task(consume(s)) for s in streams]
        await asyncio.sleep(after_s)
        fleet.kill(victim)
        for prompt, task, stream in zip(prompts, tasks, streams, strict=True):
            tokens = await task
            assert stream.completion.usage.completion_tokens == len(tokens)
            assert stream.completion.text == tokenizer.decode(tokens)
            ids = tokenizer.chat([ChatMessage(role="user", content=prompt)])
            check(gold.divergences(ids, tokens), repr(prompt[-40:]))
    await asyncio.to_thread(fleet.wait_ready, 120)


async def test_the_only_prefill_worker(fleet: Fleet, gold: Gold, tokenizer: Tokenizer) -> None:
    await run(fleet, gold, tokenizer, "prefill-1", after_s=0.6, context=CONTEXT)


async def test_the_drafter(fleet: Fleet, gold: Gold, tokenizer: Tokenizer) -> None:
    await run(fleet, gold, tokenizer, "drafter-1", after_s=1.5)


async def test_one_of_two_decode_workers_in_mid_stream(fleet: Fleet, gold: Gold, tokenizer: Tokenizer) -> None:
    await run(fleet, gold, tokenizer, "decode-1", after_s=1.5)


async def test_every_worker_at_once(fleet: Fleet, gold: Gold, tokenizer: Tokenizer) -> None:
    async with Client(fleet.url, fleet.model) as client:
        stream = client.stream("One, two, three, four,", max_tokens=30, temperature=0, deadline_ms=120_000)
        task = asyncio.create_task(consume(stream))
        await asyncio.sleep(0.8)
        for name in fleet.pids():
            with contextlib.suppress(TrineError):
                fleet.kill(name)
        tokens = await task
        check(gold.divergences(tokenizer.encode("One, two, three, four,"), tokens), "counting")
    await asyncio.to_thread(fleet.wait_ready, 120)
