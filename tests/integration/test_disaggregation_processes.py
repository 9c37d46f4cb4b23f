"""Workers as they are started, in processes of their own with fake engines: stopped, told to end, with wrong clocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.codec import decode_event
from shared.errors import Unavailable
from shared.messages import Beat, Failed, Finished, Tokens
from tests.block_faults import ask, prompt
from tests.fake_engine import completion
from tests.fake_worker import process
from tests.fleet_rig import MODEL
from tests.nats_fleet import ROOT, SUBJECTS, beat_when
from trine.client import Client

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120)]
NAMES = ("prefill-1", "decode-1", "decode-2")
ENGINE = {"blocks": 512, "step_s": 0.02}
LEASE_S, DRAIN_S = 0.8, 6.0
HOUR = 3600.0


class Fleet:
    """One prefill and two decode workers; `clocks` has a file for each whose wall clock is wrong."""

    def __init__(self, url: str, bus: NatsBus, clocks: Path) -> None:
        self.client = Client(url, MODEL)
        self.bus = bus
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._url, self._clocks = url, clocks
        self._stack = contextlib.ExitStack()

    def start(self, name: str) -> None:
        own = str(ROOT / "tests" / "chaos" / "clock")
        env = {"CHAOS_CLOCKS": str(self._clocks), "PYTHONPATH": os.pathsep.join([own, str(ROOT)])}
        role = name.partition("-")[0]
        extra = {"chunk_tokens": 8} if role == "prefill" else {"local_prefill_tokens": 0, "prefill_patience_s": 3.0}
        settings = {"ack_wait_s": LEASE_S, "beat_s": 0.2, "peer_timeout_s": 1.0, "drain_s": DRAIN_S, **extra}
        running = process(role, self._url, name, engine=ENGINE, env=env, **settings)
        self.processes[name] = self._stack.enter_context(running)

    async def serves(self, name: str) -> None:
        for _ in range(4):  # a process takes long to start on a machine that is busy
            with contextlib.suppress(TimeoutError):
                await beat_when(self.bus, name, lambda beat: not beat.draining)
                return
        raise AssertionError(f"{name} does not serve")

    def clock(self, name: str, seconds: float) -> None:
        new = self._clocks / f"{name}.new"
        new.write_text(str(seconds))
        new.rename(self._clocks / name)

    def signal(self, name: str, sign: signal.Signals) -> None:
        self.processes[name].send_signal(sign)

    async def ended(self, name: str) -> int:
        return await asyncio.to_thread(self.processes[name].wait, DRAIN_S + 5)

    def close(self) -> None:
        self._stack.close()


@contextlib.asynccontextmanager
async def fleet(folder: Path, clocks: dict[str, float] | None = None) -> AsyncIterator[Fleet]:
    with EmbeddedNats() as nats:
        bus = await NatsBus.connect(nats.url, name="test", wait=5)
        made = Fleet(nats.url, bus, folder)
        for name, seconds in (clocks or {}).items():
            made.clock(name, seconds)
        try:
            async with made.client:
                waiting = [asyncio.create_task(made.serves(name)) for name in NAMES]
                for name in NAMES:
                    made.start(name)
                await asyncio.gather(*waiting)
                yield made
        finally:
            made.close()
            await bus.close()


async def one_sequence(bus: NatsBus, request_id: str) -> None:
    """What was stored for a request: tokens from 0 without gap or repetition, and one end."""
    events = [decode_event(m.data) for m in await bus.read(SUBJECTS.event_stream, SUBJECTS.events(request_id))]
    have = 0
    for event in events[:-1]:
        assert isinstance(event, Tokens)
        assert event.index == have
        have += len(event.token_ids)
    assert isinstance(events[-1], Finished | Failed)


async def test_cases_55_and_125_frozen_workers_and_wrong_clocks(tmp_path: Path) -> None:
    hours = {"decode-1": HOUR, "decode-2": -HOUR, "prefill-1": HOUR}
    async with fleet(tmp_path, hours) as all_:
        client = all_.client

        async def burst(seed: int) -> set[str]:
            tasks = [asyncio.create_task(ask(client, prompt(40, seed + n), 40, deadline_ms=20_000)) for n in range(8)]
            await asyncio.sleep(0.4)
            if seed:  # while they run
                for name, ahead in hours.items():
                    all_.clock(name, -ahead)
            answers = await asyncio.gather(*tasks)
            assert {answer.attempts for answer in answers} == {1}
            assert {tuple(answer.served_by.prefill) for answer in answers} == {("prefill-1",)}
            return {answer.served_by.decode for answer in answers}

        assert await burst(0) == {"decode-1", "decode-2"}
        assert await burst(100) == {"decode-1", "decode-2"}
        await ask(client, prompt(40, 300), deadline_ms=20_000)
        for name in NAMES:
            counters = (await beat_when(all_.bus, name, lambda beat: True)).counters
            for expired in ("failed_deadline_exceeded", "refused_deadline_exceeded", "jobs_refused", "redeliveries"):
                assert not counters.get(expired), name

        # Prefill first, in the middle of a prompt; then whoever decodes, in the middle of the answer.
        tokens, said = prompt(300, 400), list[int]()
        stream = client.stream(token_ids=tokens, max_tokens=80, id="frozen", deadline_ms=30_000)
        busy = asyncio.create_task(beat_when(all_.bus, "prefill-1", lambda beat: beat.load.running > 0))
        holders = {n: asyncio.create_task(beat_when(all_.bus, n, _runs)) for n in ("decode-1", "decode-2")}
        frozen: list[str] = []

        async def freeze_prefill() -> None:
            await busy
            all_.signal("prefill-1", signal.SIGSTOP)
            frozen.append("prefill-1")

        freezing = asyncio.create_task(freeze_prefill())
        async for delta in stream:
            assert delta.index == len(said), "a token is missing or doubled"
            said += delta.token_ids
            if len(said) > 20 and len(frozen) == 1:
                await asyncio.wait(holders.values(), return_when=asyncio.FIRST_COMPLETED)
                frozen.append(next(name for name, task in holders.items() if task.done()))
                all_.signal(frozen[1], signal.SIGSTOP)
        await freezing
        assert len(frozen) == 2
        assert said == completion(tokens, 80)
        assert stream.completion.usage.completion_tokens == 80
        assert stream.completion.served_by.decode not in frozen
        for task in holders.values():
            task.cancel()
        await asyncio.sleep(2 * LEASE_S)
        waking = time.monotonic()
        for name in frozen:
            all_.signal(name, signal.SIGCONT)
        late = await beat_when(
            all_.bus, frozen[1], lambda beat: beat.counters.get("events_ended", 0) > 0 and not _runs(beat)
        )
        assert time.monotonic() - waking < 5
        assert late.load.running == 0, "it has noticed that another one has taken over"
        await one_sequence(all_.bus, "frozen")
        await burst(500)
        assert [process.poll() for process in all_.processes.values()] == [None] * 3


def _runs(beat: Beat) -> bool:
    return beat.load.running > 0


async def test_case_124_told_to_end_once_and_twice(tmp_path: Path) -> None:
    async with fleet(tmp_path) as all_:
        client = all_.client
        streams = [asyncio.create_task(ask(client, prompt(40, n), 60, deadline_ms=20_000, id=str(n))) for n in range(8)]
        await asyncio.sleep(0.6)
        for name in ("prefill-1", "decode-1"):
            all_.signal(name, signal.SIGTERM)
        assert [await all_.ended(name) for name in ("prefill-1", "decode-1")] == [0, 0]
        served = {answer.served_by.decode for answer in await asyncio.gather(*streams)}
        assert served == {"decode-1", "decode-2"}, "what ran on the one that left has ended there"
        for number in range(8):
            await one_sequence(all_.bus, str(number))

        # The only one left, with work for seconds, is told twice: it ends at once, another one goes on.
        long = [asyncio.create_task(ask(client, prompt(40, 50 + n), 200, deadline_ms=40_000)) for n in range(2)]
        await beat_when(all_.bus, "decode-2", lambda beat: beat.load.running == 2)
        await asyncio.sleep(0.4)
        all_.signal("decode-2", signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert all_.processes["decode-2"].poll() is None
        told = time.monotonic()
        all_.signal("decode-2", signal.SIGTERM)
        assert await all_.ended("decode-2") == 0
        assert time.monotonic() - told < DRAIN_S / 2
        all_.start("decode-3")
        await all_.serves("decode-3")
        for answer in await asyncio.gather(*long):
            assert (answer.served_by.decode, answer.attempts) == ("decode-3", 2)
        all_.signal("decode-3", signal.SIGTERM)
        assert await all_.ended("decode-3") == 0
        started = time.monotonic()
        with pytest.raises(Unavailable):
            await client.generate(token_ids=prompt(9), max_tokens=3, deadline_ms=1500)
        assert time.monotonic() - started < 3.5
