"""A long prompt is prefilled by the prefill worker, and whoever asks with the same beginning finds it in the cache."""

from __future__ import annotations

import asyncio
import signal
import uuid

import pytest

from shared.tokenizer import Tokenizer
from tests.e2e.gold import Gold, check
from trine.client import Client
from trine.supervisor import Fleet

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(200)]


async def test_cold_through_prefill_then_warm_on_any_decode_worker(
    stack: Fleet, gold: Gold, tokenizer: Tokenizer
) -> None:
    context = f"Inventory {uuid.uuid4().hex}.\n" + "\n".join(
        f"Box {n}: {n * 7 % 13} bolts, {n * 5 % 11} nuts, on shelf {n % 9}." for n in range(45)
    )
    prompts = [f"{context}\nQuestion {n}: what is in box {n}? Answer:" for n in range(6)]
    async with Client(stack.url, stack.model) as client:
        cold = await client.generate(prompts[0], max_tokens=8, temperature=0)
        assert cold.usage.prompt_tokens > 900
        assert cold.usage.cached_tokens == 0
        assert cold.served_by.prefill == ["prefill-1"]
        warm = await asyncio.gather(*(client.generate(p, max_tokens=8, temperature=0) for p in prompts[1:5]))
        stack.hold(cold.served_by.decode)
        stack.kill(cold.served_by.decode, signal.SIGTERM)
        try:
            warm.append(await client.generate(prompts[5], max_tokens=8, temperature=0))
        finally:
            stack.release(cold.served_by.decode)
            await asyncio.to_thread(stack.wait_ready, 120)
    for prompt, answer in zip(prompts, [cold, *warm], strict=True):
        check(gold.divergences(tokenizer.encode(prompt), answer.token_ids), prompt[-30:])
    common = len(tokenizer.encode(context))
    for answer in warm:
        assert common - 32 < answer.usage.cached_tokens < answer.usage.prompt_tokens
        assert answer.served_by.prefill == []
        assert answer.timings.ttft_ms < cold.timings.ttft_ms
    assert warm[-1].served_by.decode != cold.served_by.decode
