"""Hard moments in a prefill job's life: cancels, lost queues, blocks that come free late."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from services.prefill.service import PrefillWorker
from shared.codec import encode
from shared.messages import PrefillJob
from shared.subjects import Subjects
from shared.tenants import request_key
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL, FleetRig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SUBJECTS = Subjects(MODEL)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


async def queue_job(rig: FleetRig, request_id: str, seed: int, length: int = 40) -> None:
    job = PrefillJob(
        request=request_key("default", request_id),
        tenant="default",
        fingerprint="fake-weights",
        token_ids=prompt(length, seed),
        budget_ms=60_000,
    )
    await rig.bus().append(SUBJECTS.prefill(bytes([seed]) * 32), encode(job))


async def until_done(worker: PrefillWorker, jobs: int) -> None:
    async with asyncio.timeout(5):
        while worker.counters["jobs_done"] < jobs:
            await asyncio.sleep(0.01)


def queued(rig: FleetRig) -> int:
    return rig.broker.streams[SUBJECTS.prefill_stream].state().messages


async def test_who_joined_a_cancelled_job_has_it_computed_soon() -> None:
    async with FleetRig() as rig:
        for name in ("decode-1", "decode-2"):
            await rig.decode(name, local_prefill_tokens=0, prefill_patience_s=10.0, max_running=1)
        await rig.prefill(engine=FakeEngine(blocks=128, step_s=0.04))
        client = rig.client()
        leader = asyncio.create_task(client.generate(token_ids=prompt(200), max_tokens=3, id="leader"))
        await asyncio.sleep(0.1)
        joiner = asyncio.create_task(client.generate(token_ids=prompt(200), max_tokens=3, id="joiner"))
        await asyncio.sleep(0.1)
        assert sum(w.counters["prefill_joined"] for w in rig.workers.values()) >= 1
        await client.cancel("leader")
        cancelled = time.monotonic()
        answer = await joiner
        assert time.monotonic() - cancelled < 2.5
        assert list(answer.token_ids) == completion(prompt(200), 3)
        assert answer.served_by.prefill == ["prefill-1"]
        assert (await leader).finish_reason == "cancelled"


async def test_jobs_that_take_turns_are_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job has a new block for longer than the patience, while the prefill worker gets on with all of them."""
    monkeypatch.setattr("shared.cache.claim_log.LOOK_S", 0.05)
    async with FleetRig() as rig:
        decode = await rig.decode(local_prefill_tokens=0, prefill_patience_s=0.5)
        await rig.prefill(engine=FakeEngine(blocks=128, step_s=0.2))
        client = rig.client()
        prompts = [prompt(64, n) for n in range(4)]
        answers = await asyncio.gather(*(client.generate(token_ids=tokens, max_tokens=3) for tokens in prompts))
        assert [list(answer.token_ids) for answer in answers] == [completion(tokens, 3) for tokens in prompts]
        assert (decode.counters["computed_blocks"], decode.counters["prefill_given_up"]) == (4, 0)  # the last of each


async def test_queued_jobs_of_cancelled_requests_are_not_computed() -> None:
    async with FleetRig() as rig:
        await rig.decode(local_prefill_tokens=0, prefill_patience_s=5.0)
        engine = FakeEngine(blocks=128, step_s=0.1)
        worker = await rig.prefill(engine=engine, max_jobs=1)
        client = rig.client()
        tasks = [
            asyncio.create_task(client.generate(token_ids=prompt(64, n), max_tokens=3, id=f"r{n}")) for n in range(5)
        ]
        await asyncio.sleep(0.2)
        for number in reversed(range(5)):
            await client.cancel(f"r{number}")
        assert {a.finish_reason for a in await asyncio.gather(*tasks)} == {"cancelled"}
        async with asyncio.timeout(5):
            while queued(rig):
                await asyncio.sleep(0.01)
        assert engine.tokens_computed <= 64
        assert worker.counters["cancelled"] == 5
        assert worker.counters["jobs_done"] == 0


async def test_a_lost_queue_numbers_its_jobs_anew() -> None:
    async with FleetRig() as rig:
        engine = FakeEngine(blocks=128, step_s=0.1)
        worker = await rig.prefill(engine=engine)
        await queue_job(rig, "one", 1, length=400)
        await asyncio.sleep(0.2)
        assert worker.load().running == 1
        rig.broker.disconnect()
        rig.broker.wipe_memory_streams()
        rig.broker.reconnect()
        await asyncio.sleep(0.1)
        await queue_job(rig, "two", 2)  # has the number of "one", which nobody waits for any more
        await until_done(worker, 1)
        assert engine.tokens_computed < 400
        assert queued(rig) == 0
        await _empty(worker)


async def test_a_job_waits_for_blocks_until_a_cancelled_step_gives_them_back() -> None:
    async with FleetRig() as rig:
        worker = await rig.prefill(engine=FakeEngine(blocks=12, step_s=0.1))
        await queue_job(rig, "one", 1)
        await asyncio.sleep(0.05)
        await queue_job(rig, "two", 2)
        await asyncio.sleep(0.02)
        await rig.bus().publish(SUBJECTS.cancel("one"), b"")
        await until_done(worker, 1)
        assert worker.counters["cancelled"] == 1
        await _empty(worker)


async def test_a_job_waits_for_blocks_until_they_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FleetRig() as rig:
        worker = await rig.prefill(engine=FakeEngine(blocks=12, step_s=0.06))
        put, gate = worker._cache._store.put, asyncio.Event()

        async def slow(*args: Any, **options: Any) -> Any:
            await gate.wait()
            return await put(*args, **options)

        monkeypatch.setattr(worker._cache._store, "put", slow)
        await queue_job(rig, "one", 1)
        await queue_job(rig, "two", 2)
        await asyncio.sleep(0.08)  # in the second of three steps
        await rig.bus().publish(SUBJECTS.cancel("one"), b"")
        await asyncio.sleep(0.2)
        assert worker._allocator.in_use == 4
        assert worker.counters["jobs_done"] == 0
        gate.set()
        await until_done(worker, 1)
        await _empty(worker)


async def test_a_cancelled_id_may_come_with_another_job() -> None:
    async with FleetRig() as rig:
        worker = await rig.prefill(engine=FakeEngine(blocks=128))
        await rig.bus().publish(SUBJECTS.cancel("one"), b"")
        await asyncio.sleep(0.55)
        await queue_job(rig, "one", 1)
        await until_done(worker, 1)


async def test_cancels_at_random_moments_leak_no_block() -> None:
    async with FleetRig() as rig:
        await rig.decode(local_prefill_tokens=0, prefill_patience_s=0.5, engine=FakeEngine(blocks=128, step_s=0.002))
        worker = await rig.prefill(engine=FakeEngine(blocks=40, step_s=0.003))
        client, rng = rig.client(), random.Random(2)

        async def one(number: int) -> None:
            tokens = prompt(20, number % 5) + prompt(5 + number % 60, number % 9)
            stream = client.stream(token_ids=tokens, max_tokens=10)
            try:
                async with asyncio.timeout(rng.random() * 0.3), stream:
                    async for _ in stream:
                        pass
            except TimeoutError:
                pass

        for start in range(0, 48, 12):
            await asyncio.gather(*(one(n) for n in range(start, start + 12)))
        await rig.quiet()
        await _empty(worker)


async def _empty(worker: PrefillWorker) -> None:
    """Wait until the worker holds no job and no block."""
    async with asyncio.timeout(5):
        while worker.load().running or worker._allocator.in_use:
            await asyncio.sleep(0.01)
    worker._allocator.check_integrity()
