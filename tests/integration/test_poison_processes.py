"""A request that kills the process of every worker that tries it, on a real server; and what operators do then."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.errors import Poison
from tests.fake_engine import completion
from tests.fleet_rig import MODEL
from tests.nats_fleet import ROOT, WAIT_S, worker_process
from trine.client import Client
from trine.dead import dead

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(90)]
POISON = 997  # none of the right answers has it
PROMPT = list(range(100, 140))
BAD = [*PROMPT[:30], POISON, *PROMPT[30:]]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as running:
        yield running


class Hands:
    """Two workers, each started again when its process dies; `engine` of those to come."""

    def __init__(self, url: str) -> None:
        self.engine = {"blocks": 128, "step_s": 0.01, "crash_on": POISON}
        self.deaths: list[str] = []
        self.pids: set[int] = set()
        self._url = url

    async def keep(self, name: str) -> None:
        while True:
            worker = contextlib.ExitStack()
            with worker:
                settings = {"engine": self.engine, "max_running": 8, "local_prefill_tokens": 1000}
                start = worker_process("decode", self._url, name, **settings)  # type: ignore[arg-type]
                process = await asyncio.to_thread(worker.enter_context, start)
                self.pids.add(process.pid)
                try:
                    await self._until_dead(process)
                finally:
                    self.pids.discard(process.pid)
            self.deaths.append(name)

    async def _until_dead(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            await asyncio.sleep(0.02)

    async def ready(self) -> None:
        async with asyncio.timeout(30):
            while len(self.pids) < 2:
                await asyncio.sleep(0.02)


def trine(server: EmbeddedNats, *arguments: str) -> str:
    command = [sys.executable, "-m", "trine.cli", "dead", *arguments, "--nats", server.url, "--model", MODEL]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30).stdout


async def test_it_is_tried_twice_kept_and_can_be_tried_again(server: EmbeddedNats) -> None:
    hands = Hands(server.url)
    keeping = [asyncio.create_task(hands.keep(name)) for name in ("decode-1", "decode-2")]
    try:
        await hands.ready()
        async with Client(server.url, MODEL) as client:
            good = [asyncio.create_task(client.generate(token_ids=PROMPT[n:], max_tokens=150)) for n in range(4)]
            await asyncio.sleep(0.3)  # they have tokens
            with pytest.raises(Poison):
                await client.generate(token_ids=BAD, max_tokens=3, id="bad")
            assert len(hands.deaths) == 2
            for n, asked in enumerate(good):
                assert list((await asked).token_ids) == completion(PROMPT[n:], 150)
            assert len(hands.deaths) == 2

            [listed] = json.loads(await asyncio.to_thread(trine, server, "ls", "--json"))
            assert (listed["id"], listed["attempts"], listed["workers"]) == ("bad", 2, hands.deaths)
            bus = await NatsBus.connect(server.url, name="test", wait=WAIT_S)
            assert [len(await dead(bus, MODEL, tenant)) for tenant in ("default", "acme")] == [1, 0]
            shown = json.loads(await asyncio.to_thread(trine, server, "show", "bad", "--json"))
            assert shown["request"]["token_ids"] == BAD

            hands.engine = {"blocks": 128}  # the fault is found
            for task in keeping:
                task.cancel()
            await asyncio.wait(keeping)
            keeping = [asyncio.create_task(hands.keep(name)) for name in ("decode-1", "decode-2")]
            await hands.ready()
            assert "queued again" in await asyncio.to_thread(trine, server, "retry", "bad")
            async with asyncio.timeout(WAIT_S):
                while True:
                    stream = client.resume("bad")
                    with contextlib.suppress(Poison):  # of the first time
                        async for _ in stream:
                            pass
                        break
            assert list(stream.completion.token_ids) == completion(BAD, 3)
        assert await dead(bus, MODEL) == []
        await bus.close()
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.wait(keeping)
