"""NATS absent at start, then arriving; NATS killed and restarted under load: workers recover by themselves."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from shared.bus.embedded import EmbeddedNats
from trine.client import Client
from trine.supervisor import Fleet

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_absent_at_start_then_arriving_then_restarted_under_load(tmp_path: Path) -> None:
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
                    again = await client.generate(f"Number {number} is", max_tokens=60, temperature=0)
                    assert answer.token_ids == again.token_ids
                assert (await client.generate("The sea is", max_tokens=8, temperature=0)).text == first.text
            assert fleet.pids() == pids, "a worker had to be restarted"
        finally:
            server.stop()
