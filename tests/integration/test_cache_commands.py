"""What `trine cache` tells and does, over a fleet."""

from __future__ import annotations

import asyncio

import pytest

from shared.cache.naming import PUBLIC
from shared.errors import UnknownModel
from shared.subjects import Subjects
from tests.fake_engine import completion
from tests.fleet_rig import MODEL, FleetRig
from trine import cache
from trine.cache import drop, shares, stat

PROMPT = list(range(100, 149))  # 12 blocks and one token
pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _beats_come_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BEATS_S", 0.2)


async def warm(rig: FleetRig, prompts: int = 1) -> None:
    """PROMPT, and others that differ from the first token on."""
    for number in range(prompts):
        tokens = [number, *PROMPT[1:]] if number else PROMPT
        answer = await rig.client().generate(token_ids=tokens, max_tokens=2)
        assert list(answer.token_ids) == completion(tokens, 2)
    await stored(rig, 12 * prompts)


async def stored(rig: FleetRig, blocks: int) -> None:
    async with asyncio.timeout(5):
        while (await rig.bus().stream_state(Subjects(MODEL).block_stream)).messages < blocks:
            await asyncio.sleep(0.01)


async def test_what_the_stream_holds_by_tenant() -> None:
    async with FleetRig() as rig:
        await rig.decode()
        assert await shares(rig.bus(), MODEL) == []
        await warm(rig, 2)
        subjects = Subjects(MODEL)
        for scope in ("acme", PUBLIC):
            await rig.bus().append(subjects.block(bytes(32), 0, scope), b"x" * 300)
        await rig.bus().append(f"{subjects.prefix}.kv.x.y.z", b"junk")
        found = {share.tenant: share for share in await shares(rig.bus(), MODEL)}
        assert {tenant: share.blocks for tenant, share in found.items()} == {"default": 24, "acme": 1, PUBLIC: 1}
        assert found["default"].bytes > 20 * found["acme"].bytes > 0


async def test_counters_by_worker_and_tier() -> None:
    async with FleetRig() as rig:
        await rig.decode("decode-1")
        await warm(rig)
        await rig.client().generate(token_ids=PROMPT, max_tokens=1)
        await rig.decode("decode-2", affinity=False)
        await rig.kill("decode-1")
        await rig.client().generate(token_ids=PROMPT, max_tokens=1)
        found = await stat(rig.bus(), MODEL)
        assert found.counters["decode-2"]["hit"] == 12
        assert found.totals["hit"] == 12
        assert found.stream_blocks == 12
        assert found.stream_bytes > 0


async def test_nothing_is_known_of_another_model() -> None:
    async with FleetRig() as rig:
        for ask in (shares, stat):
            with pytest.raises(UnknownModel):
                await ask(rig.bus(), "other")


class TestDrop:
    async def test_nobody_finds_what_was_dropped_and_everybody_goes_on(self) -> None:
        async with FleetRig() as rig:
            await rig.decode("decode-1")
            await rig.prefill()
            await warm(rig)
            report = await drop(rig.bus(), MODEL, "default")
            assert report.messages == 12
            assert report.silent == []
            assert sum(done.pool_blocks for done in report.done) >= 12
            await asyncio.sleep(0.1)
            again = await rig.client().generate(token_ids=PROMPT, max_tokens=2)
            assert again.usage.cached_tokens == 0
            assert list(again.token_ids) == completion(PROMPT, 2)
            await stored(rig, 12)
            warm_again = await rig.client().generate(token_ids=PROMPT, max_tokens=2)
            assert warm_again.usage.cached_tokens == 48

    async def test_other_scopes_stay_in_the_stream(self) -> None:
        async with FleetRig() as rig:
            await rig.decode()
            await warm(rig)
            subjects = Subjects(MODEL)
            await rig.bus().append(subjects.block(bytes(32), 0, "acme"), b"x")
            assert (await drop(rig.bus(), MODEL, "acme")).messages == 1
            assert [share.tenant for share in await shares(rig.bus(), MODEL)] == ["default"]
            await asyncio.sleep(0.3)  # the index has been learnt anew
            answer = await rig.client().generate(token_ids=PROMPT, max_tokens=1)
            assert answer.usage.cached_tokens == 48

    async def test_everything(self) -> None:
        async with FleetRig() as rig:
            await rig.decode()
            await warm(rig, 2)
            assert (await drop(rig.bus(), MODEL, None)).messages == 24
            assert await shares(rig.bus(), MODEL) == []

    async def test_a_request_that_runs_goes_on(self) -> None:
        async with FleetRig() as rig:
            await rig.decode()
            running = asyncio.create_task(rig.client().generate(token_ids=PROMPT, max_tokens=300))
            await asyncio.sleep(0.05)
            await drop(rig.bus(), MODEL, None)
            assert list((await running).token_ids) == completion(PROMPT, 300)
            await rig.quiet()

    async def test_a_worker_that_does_not_answer_is_named(self) -> None:
        async with FleetRig() as rig:
            await rig.decode("decode-1")
            await rig.decode("decode-2")
            await rig.bus().publish(Subjects(MODEL).drop, b"garbage")
            task = asyncio.create_task(drop(rig.bus(), MODEL, None))
            await asyncio.sleep(0.1)  # it listens to beats still
            await rig.kill("decode-2")
            report = await task
            assert report.silent == ["decode-2"]
            assert [done.worker for done in report.done] == ["decode-1"]
