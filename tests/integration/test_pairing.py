"""Workers pair only with peers that fit, and start only where the streams fit."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shared.errors import ConfigError
from shared.streams import event_stream, request_stream
from shared.subjects import Subjects
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL, FleetRig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]
PROMPT = [n * 7 % 1000 for n in range(60)]


async def test_a_drafter_with_another_vocabulary_is_never_asked() -> None:
    async with FleetRig() as rig:
        decode = await rig.decode(draft_depth=4, draft_wait_ms=100, draft_adaptive=False)
        drafter = await rig.drafter()
        drafter._vocabulary = "another tokenizer"
        await asyncio.sleep(0.2)
        answer = await rig.client().generate(token_ids=PROMPT, max_tokens=30)
        assert list(answer.token_ids) == completion(PROMPT, 30)
        assert answer.usage.drafted_tokens == 0
        assert decode.counters["mismatched_peers"] >= 1  # again, if its beats paused for long enough to be forgotten
        drafter._vocabulary = "fake-vocabulary"
        await asyncio.sleep(0.2)
        assert (await rig.client().generate(token_ids=PROMPT, max_tokens=30)).usage.drafted_tokens > 0


@pytest.mark.parametrize("difference", ["weights", "block size"])
async def test_a_prefill_worker_that_differs_is_done_without(difference: str) -> None:
    async with FleetRig() as rig:
        decode = await rig.decode(local_prefill_tokens=0)
        engine = {
            "weights": FakeEngine(blocks=128, fingerprint="other"),
            "block size": FakeEngine(blocks=128, block_size=8),
        }[difference]
        await rig.prefill(engine=engine)
        await asyncio.sleep(0.2)
        answer = await rig.client().generate(token_ids=PROMPT, max_tokens=10)
        assert list(answer.token_ids) == completion(PROMPT, 10)
        assert decode.counters["mismatched_peers"] >= 1  # again, if its beats paused for long enough to be forgotten
        assert decode.counters["prefill_jobs"] == 0


async def test_a_stream_with_another_configuration_stops_the_start_and_is_named() -> None:
    async with FleetRig() as rig:
        await rig.bus().ensure_stream(replace(event_stream(Subjects(MODEL)), max_age=5.0))
        with pytest.raises(ConfigError) as caught:
            await rig.decode()
        assert Subjects(MODEL).event_stream in caught.value.message
        assert "max_age" in caught.value.message


async def test_a_full_queue_refuses_at_once() -> None:
    async with FleetRig() as rig:
        settings = (
            await rig.decode("decode-1", FakeEngine(blocks=128, step_s=0.05), max_running=1, max_queued=3)
        ).settings
        client = rig.client()
        tasks = [asyncio.create_task(client.generate(token_ids=[n] * 9, max_tokens=12)) for n in range(12)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [r for r in results if isinstance(r, Exception)]
        assert {getattr(r, "code", None) for r in refused} == {"overloaded"}
        assert 0 < len(refused) < 12
        assert request_stream(Subjects(MODEL), settings).max_msgs == 3
