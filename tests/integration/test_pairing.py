"""Workers pair only with peers that fit, and start only where the streams fit."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.codec import encode
from shared.errors import ConfigError
from shared.messages import Beat
from shared.streams import event_stream, request_stream
from shared.subjects import Subjects
from shared.worker import EXIT_CONFIG
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL, FleetRig
from tests.nats_fleet import ROOT
from tests.tiny_models import ARCHITECTURES, write

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
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


OTHERS = {
    "fingerprint": {"fingerprint": "other"},
    "block_size": {"block_size": 8},
    "codec": {"codec": "int8"},
}


@pytest.mark.parametrize("difference", OTHERS)
async def test_a_worker_that_differs_from_the_fleet_does_not_join_and_says_why(difference: str) -> None:
    async with FleetRig() as rig:
        decode = await rig.decode(local_prefill_tokens=0)
        other = FakeEngine(blocks=128, **OTHERS[difference])  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as caught:
            await rig.prefill(engine=other)
        mine, theirs = (getattr(engine.identity, difference) for engine in (other, rig.engines["decode-1"]))
        assert f"{difference}: {mine} here, {theirs} there" in caught.value.message
        assert "(decode-1)" in caught.value.message
        answer = await rig.client().generate(token_ids=PROMPT, max_tokens=10)
        assert list(answer.token_ids) == completion(PROMPT, 10)
        assert decode.counters["prefill_jobs"] == 0
        await rig.kill("prefill-1")
        await rig.kill("decode-1")
        await rig.prefill(engine=other)  # now it is the fleet
        with pytest.raises(ConfigError, match="prefill-1"):
            await rig.decode()


@pytest.mark.slow
async def test_its_process_ends_with_a_code_that_says_not_to_start_it_again(tmp_path: Path) -> None:
    write(tmp_path, ARCHITECTURES["llama"])
    with EmbeddedNats() as server:
        bus = await NatsBus.connect(server.url, name="test", wait=5)
        beat = encode(Beat(role="decode", worker="decode-1", identity=FakeEngine().identity))
        env = {"TRINE_NATS_URL": server.url, "TRINE_MODEL": str(tmp_path), "TRINE_MODEL_NAME": MODEL}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.prefill"),
            cwd=ROOT,
            env={**os.environ, **env, "TRINE_KV_BLOCKS": "16", "TRINE_HOST_CACHE_MB": "0"},
            stderr=asyncio.subprocess.PIPE,
        )
        said = asyncio.create_task(process.communicate())
        async with asyncio.timeout(60):
            while not said.done():
                await bus.publish(Subjects(MODEL).beat("decode", "decode-1"), beat)
                await asyncio.sleep(0.1)
        await bus.close()
    assert process.returncode == EXIT_CONFIG
    assert b"fake-weights there" in said.result()[1]
    assert b"block_size: 16 here, 4 there" in said.result()[1]


@pytest.mark.parametrize("difference", OTHERS)
async def test_of_those_that_start_together_and_differ_some_give_way_and_say_why(difference: str) -> None:
    """Case 63. Most of one kind serve; of as many, the kind with the first name."""
    other = OTHERS[difference]
    for kinds, serving in (
        ({"decode-1": {}, "prefill-1": other}, {"decode-1"}),
        ({"decode-1": other, "prefill-1": {}, "prefill-2": {}}, {"prefill-1", "prefill-2"}),
        ({"decode-1": {}, "decode-2": {}, "prefill-1": other, "prefill-2": other}, {"decode-1", "decode-2"}),
    ):
        async with FleetRig() as rig:
            starts = []
            for name, kind in kinds.items():
                start = rig.decode if name.startswith("decode") else rig.prefill
                starts.append(start(name, FakeEngine(blocks=128, **kind)))  # type: ignore[arg-type]
            started = dict(zip(kinds, await asyncio.gather(*starts, return_exceptions=True), strict=True))
            refused = {name: error for name, error in started.items() if isinstance(error, BaseException)}
            assert set(kinds) - set(refused) == serving
            for error in refused.values():
                assert isinstance(error, ConfigError)
                assert f"{difference}: " in error.message
                assert f"({min(serving)})" in error.message


async def test_a_fleet_of_another_kind_that_is_leaving_is_nobodys_hindrance() -> None:
    async with FleetRig() as rig:
        await rig.decode("decode-1", FakeEngine(blocks=128, step_s=0.02), drain_s=10.0)
        task = asyncio.create_task(rig.client().generate(token_ids=PROMPT, max_tokens=60))
        await asyncio.sleep(0.2)
        drained = asyncio.create_task(rig.drain("decode-1"))
        await asyncio.sleep(0.1)
        await rig.decode("decode-2", FakeEngine(blocks=128, fingerprint="other"))
        assert list((await task).token_ids) == completion(PROMPT, 60)
        await drained


async def test_who_hears_one_like_itself_joins_whatever_else_is_said() -> None:
    async with FleetRig() as rig:
        await rig.decode("decode-1")
        beat = Beat(role="decode", worker="a-liar", identity=FakeEngine(fingerprint="other").identity)
        for name in ("decode-2", "decode-3"):
            await rig.bus().publish(Subjects(MODEL).beat("decode", "a-liar"), encode(beat))
            await rig.decode(name)


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
