"""Failure cases of NATS and JetStream met in the field, over fleets of fake engines on real nats-servers.

An answer is right only if every block was; `ask` checks it. Where a case tells minutes, settings are shortened.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import services.decode.service as decode_service
import shared.streams as streams
from shared.bus import nats_client, nats_follow
from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.codec import decode_event
from shared.engine.span import Span
from shared.errors import BusDisconnected, Unavailable, UnknownModel
from shared.job_actor import JobActor
from shared.messages import Finished
from shared.subjects import PRIORITIES
from tests.block_faults import ask, prompt
from tests.cache_rig import eventually
from tests.fake_engine import FakeEngine
from tests.fleet_rig import MODEL
from tests.lying_server import free_port
from tests.nats_fleet import SUBJECTS, NatsFleet, worker_process
from trine.client import Client
from trine.readiness import await_ready

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
B = 4
HEALTH = Path(__file__).parents[2] / "deploy" / "healthcheck.py"


class Witness(FakeEngine):
    """Remembers the first token of each prompt that it computed."""

    def __init__(self, step_s: float) -> None:
        super().__init__(blocks=128, step_s=step_s)
        self.began: set[int] = set()

    def step(self, spans: Sequence[Span]) -> list[list[int]]:
        self.began |= {span.token_ids[0] for span in spans if span.start == 0}
        return super().step(spans)


async def test_cases_71_and_73_an_outage_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 requests, of which 14 wait in a file; 6 of these are given up while the server is away.

    A client that comes back after the workers cannot help what they have begun: here all knock often."""
    monkeypatch.setattr(nats_client, "next_server", lambda servers, _: (servers[0], 0.1))
    nats = EmbeddedNats(free_port(), tmp_path / "store")
    await nats.start_async()
    try:
        async with NatsFleet(nats.url) as rig, Client(nats.url, MODEL) as client:
            engines = [Witness(0.05) for _ in range(2)]
            for number, engine in enumerate(engines):
                await rig.decode(f"decode-{number}", engine, max_running=3, ack_wait_s=1.0)
            actors = list(rig.workers.values())
            kept = [asyncio.create_task(ask(client, [n] * 9, 30, deadline_ms=30_000)) for n in range(14)]
            await eventually(lambda: sum(len(engine.began) for engine in engines) >= 6)
            given_up = [asyncio.create_task(ask(client, [900 + n] * 9, 30)) for n in range(6)]
            bus = await NatsBus.connect(nats.url, name="test", wait=5)
            async with asyncio.timeout(5):
                while (await bus.stream_state(SUBJECTS.request_stream)).last_seq < 20:
                    await asyncio.sleep(0.01)
            nats.kill()
            await eventually(lambda: client._bus is not None and not client._bus.connected)
            started = time.monotonic()
            with pytest.raises(BusDisconnected):
                await ask(client, prompt(9))
            with pytest.raises((BusDisconnected, Unavailable)):
                await await_ready(bus, MODEL, {"decode": 1}, 0.5)
            assert time.monotonic() - started < 1.5
            for task in given_up:
                task.cancel()
            await asyncio.gather(*given_up, return_exceptions=True)
            await asyncio.sleep(1.0)
            await nats.start_async()
            started = time.monotonic()
            await eventually(lambda: client._bus is not None and client._bus.connected, 10)
            await ask(client, prompt(30), deadline_ms=15_000)
            assert time.monotonic() - started < 15
            await asyncio.gather(*kept)
            await bus.close()
            assert list(rig.workers.values()) == actors
            await rig.quiet()
            assert not {900 + n for n in range(6)} & (engines[0].began | engines[1].began)
    finally:
        nats.stop()


@pytest.mark.parametrize("held", [True, False], ids=["held", "delivered twice"])
async def test_case_75_a_prefill_five_times_as_long_as_the_ack_wait(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers of each role. Without its holds, whatever takes so long is delivered again, and done again."""
    if not held:
        monkeypatch.setattr(JobActor, "_hold", lambda _: asyncio.sleep(60))
    tokens = prompt(4 * B + 1)
    with EmbeddedNats() as nats:
        async with NatsFleet(nats.url) as rig, Client(nats.url, MODEL) as client:
            for n in (1, 2):
                await rig.prefill(f"prefill-{n}", FakeEngine(step_s=1.25), ack_wait_s=0.25)
                await rig.decode(f"decode-{n}", local_prefill_tokens=0, prefill_patience_s=4.0, ack_wait_s=0.25)
            answer = await ask(client, tokens, 8, id="one")
            workers = rig.workers.values()
            bus = await NatsBus.connect(nats.url, name="test", wait=5)
            await rig.quiet()
            stored = await bus.read(SUBJECTS.event_stream, SUBJECTS.events("one"))
            ends = [event for m in stored if isinstance(event := decode_event(m.data), Finished)]
            assert [end.usage.completion_tokens for end in ends] == [8]
            done = sum(worker.counters["jobs_done"] for worker in workers)
            assert done == 1 if held else done > 1
            if held:
                assert answer.attempts == 1
                assert not any(worker.counters["redeliveries"] for worker in workers)
            await bus.close()


async def test_case_77_a_dead_worker_holds_all_that_may_be_out(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = streams.request_consumers
    monkeypatch.setattr(
        decode_service, "request_consumers", lambda *args: [replace(spec, max_ack_pending=4) for spec in specs(*args)]
    )
    with EmbeddedNats() as nats:
        async with NatsFleet(nats.url) as rig, Client(nats.url, MODEL) as client:
            dead = await rig.decode("decode-1", FakeEngine(step_s=0.3), max_running=4, ack_wait_s=1.5)
            tasks = [asyncio.create_task(ask(client, [n] * 9, 12, deadline_ms=20_000)) for n in range(8)]
            await eventually(lambda: dead.load().running == 4)
            await rig.decode("decode-2", max_running=4, ack_wait_s=1.5)
            killed = time.monotonic()
            await rig.kill("decode-1")
            await ask(client, prompt(9), priority="high", deadline_ms=1000)  # not behind them
            assert not any(task.done() for task in tasks)
            await asyncio.gather(*tasks)
            assert time.monotonic() - killed < 1.5 + 4


async def consumers(bus: NatsBus) -> dict[str, int]:
    """How many each stream has."""
    names = json.loads((await bus.request("$JS.API.STREAM.NAMES", b"", 2)).data)["streams"]
    found = {}
    for name in names:
        info = json.loads((await bus.request(f"$JS.API.STREAM.INFO.{name}", b"", 2)).data)
        found[name] = info["state"]["consumer_count"]
    return found


@pytest.mark.slow
async def test_case_78_restarts_leave_no_consumers_and_idling_takes_none_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 restarts of either role, most without a word. Then idle, then busy, for longer than what expires may live."""
    monkeypatch.setattr(nats_follow, "LINGER", 1.0)
    tokens = prompt(5 * B + 1)
    with EmbeddedNats() as nats:
        async with NatsFleet(nats.url) as rig, Client(nats.url, MODEL) as client:
            bus = await NatsBus.connect(nats.url, name="test", wait=5)
            await asyncio.gather(rig.decode(), rig.prefill())
            await ask(client, tokens)
            baseline = await consumers(bus)
            assert baseline[SUBJECTS.request_stream] == len(PRIORITIES)
            assert baseline[SUBJECTS.prefill_stream] == 1
            for number in range(20):
                for name in list(rig.workers):
                    await (rig.kill(name) if number % 5 else rig.drain(name))
                    if name in rig.workers:
                        await rig.kill(name)
                engine = FakeEngine(step_s=0.7 if number == 19 else 0.0)
                await asyncio.gather(rig.decode(engine=engine), rig.prefill())
            await asyncio.sleep(2.5)
            assert await consumers(bus) == baseline
            assert (await ask(client, tokens, 4)).usage.cached_tokens == 5 * B
            await asyncio.sleep(0.3)
            assert await consumers(bus) == baseline
            await bus.close()


async def test_case_80_a_client_without_nats_and_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trine.client.CONNECT_S", 0.5)
    started = time.monotonic()
    nats = EmbeddedNats(free_port())
    with pytest.raises(BusDisconnected, match="no NATS server"):
        async with Client(nats.url, MODEL):
            pass
    assert time.monotonic() - started < 2
    with nats:
        async with Client(nats.url, MODEL) as client:
            started = time.monotonic()
            with pytest.raises(UnknownModel, match="no decode worker"):
                await client.generate(token_ids=prompt(9))
            assert time.monotonic() - started < 3
            async with NatsFleet(nats.url) as rig:
                await rig.decode()
                await ask(client, prompt(9))


@pytest.mark.slow
async def test_case_80_workers_in_any_order_and_before_nats() -> None:
    tokens = prompt(10 * B + 1)
    for order in permutations(("decode", "prefill", "drafter")):
        nats = EmbeddedNats(free_port())
        async with NatsFleet(nats.url) as rig:
            decode = partial(rig.decode, local_prefill_tokens=0)
            starts: dict[str, Callable[[], Coroutine[Any, Any, object]]]
            starts = {"decode": decode, "prefill": rig.prefill, "drafter": rig.drafter}
            first = asyncio.create_task(starts[order[0]]())  # it waits for the server
            await asyncio.sleep(0.05)
            await nats.start_async()
            try:
                await first
                for role in order[1:]:
                    await starts[role]()
                async with Client(nats.url, MODEL) as client:
                    assert (await ask(client, tokens)).served_by.prefill == ["prefill-1"], order
            finally:
                nats.stop()


async def test_case_82_other_bytes_under_a_valid_name_are_counted_and_computed_anew() -> None:
    """By somebody who may publish blocks; on the shipped configuration clients may not (test_secure_actions)."""
    tokens = prompt(6 * B + 1)
    with EmbeddedNats() as nats:
        async with NatsFleet(nats.url) as rig, Client(nats.url, MODEL) as client:
            bus = await NatsBus.connect(nats.url, name="forger", wait=5)
            await rig.decode("decode-1")
            await ask(client, tokens)
            counts: dict[str, int] = {}
            async with asyncio.timeout(5):
                while len(counts) < 6:
                    counts = await bus.subject_counts(SUBJECTS.block_stream, SUBJECTS.blocks)
            for subject in counts:
                block = (await bus.get_many(SUBJECTS.block_stream, [subject]))[subject].data
                await bus.append(subject, block[:-4] + bytes(4))
            await rig.kill("decode-1")
            worker = await rig.decode("decode-2")
            assert (await ask(client, tokens)).usage.cached_tokens == 0
            assert worker.more_counters()["cache_reject"] > 0
            await bus.close()


async def test_a_full_prefill_queue_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = streams.prefill_stream

    def tiny(*args: object) -> object:
        return replace(spec(*args), max_msgs=1)  # type: ignore[arg-type]

    monkeypatch.setattr(streams, "prefill_stream", tiny)
    monkeypatch.setattr("services.prefill.service.prefill_stream", tiny)
    with EmbeddedNats() as nats:
        async with NatsFleet(nats.url) as rig, Client(nats.url, MODEL) as client:
            worker = await rig.decode(local_prefill_tokens=0, prefill_patience_s=5.0)
            await rig.prefill(engine=FakeEngine(step_s=1.0))
            answers = await asyncio.gather(*(ask(client, prompt(4 * B + 1, n)) for n in range(4)))
            assert worker.counters["prefill_jobs"] == 1
            assert sum(answer.served_by.prefill == [] for answer in answers) == 3


def healthcheck() -> ModuleType:
    spec = importlib.util.spec_from_file_location("healthcheck", HEALTH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_case_123_who_serves_nothing_is_neither_well_nor_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A frozen worker, one whose model never loads, and NATS away: said within seconds, with the reason."""
    module = healthcheck()
    monkeypatch.setattr(module, "WAIT_S", 0.5)

    async def well(worker: str) -> tuple[int, str]:
        monkeypatch.setenv("TRINE_WORKER", worker)
        code = await asyncio.to_thread(module.main)
        return code, capsys.readouterr().err

    with EmbeddedNats() as nats:
        monkeypatch.setenv("TRINE_NATS_URL", nats.url)
        monkeypatch.setenv("TRINE_MODEL_NAME", MODEL)
        bus = await NatsBus.connect(nats.url, name="test", wait=5)
        with worker_process("decode", nats.url, "decode-1", engine={"blocks": 64}) as worker:
            assert (await well("decode-1"))[0] == 0
            await await_ready(bus, MODEL, {"decode": 1}, 5)
            os.kill(worker.pid, signal.SIGSTOP)
            code, why = await well("decode-1")
            assert code == 1 and "none within" in why
            with pytest.raises(Unavailable, match="1 decode"):
                await await_ready(bus, MODEL, {"decode": 1}, 0.5)
            os.kill(worker.pid, signal.SIGCONT)
            await await_ready(bus, MODEL, {"decode": 1}, 5)
            assert (await well("decode-2"))[0] == 1  # it has no model, so it has no beat
        nats.kill()
        code, why = await well("decode-1")
        assert code == 1 and "no NATS server" in why
        await bus.close()
