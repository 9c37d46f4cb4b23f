"""NATS absent at start, then arriving; NATS killed and restarted under load: workers recover by themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from shared.bus.embedded import EmbeddedNats
from shared.messages import Sampling
from shared.tokenizer import Tokenizer
from tests.e2e.gold import Gold, check
from trine.client import Client
from trine.completion import Completion
from trine.supervisor import Fleet

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]


def verify(gold: Gold, tokenizer: Tokenizer, prompt: str, answer: Completion, sampling: Sampling) -> None:
    """The reference's text, no token lost or doubled on the way."""
    assert answer.usage.completion_tokens == len(answer.token_ids)
    assert answer.text == tokenizer.decode(answer.token_ids)
    check(gold.divergences(tokenizer.encode(prompt), answer.token_ids, sampling, answer.seed), repr(prompt))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_absent_at_start_then_arriving_then_restarted_under_load(
    tmp_path: Path, gold: Gold, tokenizer: Tokenizer
) -> None:
    port = free_port()
    server = EmbeddedNats(port=port, store_dir=tmp_path / "store")
    with Fleet({"prefill": 1, "decode": 1}, nats=f"nats://127.0.0.1:{port}", env={"TRINE_LOG_FORMAT": "json"}) as fleet:
        await asyncio.sleep(6)  # workers load their weights and find no server
        pids = fleet.pids()
        assert len(pids) == 2
        server.start()
        try:
            await asyncio.to_thread(fleet.wait_ready, 60)
            async with Client(fleet.url, fleet.model) as client:
                first = await client.generate("The sea is", max_tokens=8, temperature=0)
                running = [
                    asyncio.create_task(
                        client.generate(f"Number {n} is", max_tokens=60, temperature=0, deadline_ms=90_000)
                    )
                    for n in range(4)
                ]
                await asyncio.sleep(1.5)
                server.kill()
                await asyncio.sleep(2)
                server.start()
                answers = await asyncio.gather(*running)
                for number, answer in enumerate(answers):
                    verify(gold, tokenizer, f"Number {number} is", answer, Sampling(temperature=0))
                assert (await client.generate("The sea is", max_tokens=8, temperature=0)).text == first.text
            assert fleet.pids() == pids, "a worker had to be restarted"
        finally:
            server.stop()


async def test_frozen_for_longer_than_the_ack_wait_then_going_on(gold: Gold, tokenizer: Tokenizer) -> None:
    """Nothing is lost, but requests are delivered a second time, and two attempts write until one is refused."""
    with Fleet({"decode": 2}, nats="embedded:0", env={"TRINE_LOG_FORMAT": "json"}) as fleet:
        await asyncio.to_thread(fleet.wait_ready, 60)
        assert fleet.nats is not None
        pid = fleet.nats.pid
        assert pid is not None
        async with Client(fleet.url, fleet.model) as client:
            running = [
                asyncio.create_task(
                    client.generate(f"Report {n}: on the", temperature=0.8, seed=n, max_tokens=80, deadline_ms=90_000)
                )
                for n in range(6)
            ]
            await asyncio.sleep(2)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(9)
            os.kill(pid, signal.SIGCONT)
            answers = await asyncio.gather(*running)
            for number, answer in enumerate(answers):
                verify(gold, tokenizer, f"Report {number}: on the", answer, Sampling(temperature=0.8))
