"""Scheduling under hard loads, through the whole fleet: nothing is mixed up, held up, or starved."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from services.decode.intake import PULL_S
from services.decode.turns import SHARE
from shared.errors import ContextLengthExceeded
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import FleetRig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


async def test_what_just_fits_the_pool_is_served_what_does_not_is_refused_and_small_ones_go_on() -> None:
    """Case 117."""
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=8, step_s=0.002))  # 32 positions
        client = rig.client()
        sizes = {"one block less": 25, "all": 29, "one block more": 30}
        big = {
            name: asyncio.create_task(client.generate(token_ids=prompt(size, size), max_tokens=4))
            for name, size in sizes.items()
        }
        small = [client.generate(token_ids=prompt(3, n), max_tokens=3) for n in range(8)]
        for number, answer in enumerate(await asyncio.gather(*small)):
            assert list(answer.token_ids) == completion(prompt(3, number), 3)
        with pytest.raises(ContextLengthExceeded, match="9 KV blocks; this worker has 8"):
            await big.pop("one block more")
        for name, task in big.items():
            assert list((await task).token_ids) == completion(prompt(sizes[name], sizes[name]), 4)
        await rig.quiet()


async def test_twenty_long_ones_in_a_pool_for_three_all_finish_with_few_preemptions() -> None:
    """Case 119."""
    async with FleetRig() as rig:
        worker = await rig.decode(engine=FakeEngine(blocks=30), max_running=20)
        client = rig.client()
        answers = await asyncio.gather(*(client.generate(token_ids=prompt(5, n), max_tokens=35) for n in range(20)))
        for number, answer in enumerate(answers):
            assert list(answer.token_ids) == completion(prompt(5, number), 35)
        assert 0 < worker.scheduler.preemptions <= 20
        await rig.quiet()


async def test_one_low_request_finishes_under_an_endless_high_load() -> None:
    """Case 121."""
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=64, step_s=0.001), max_running=2)
        client = rig.client()
        done = 0

        async def keep_asking(number: int) -> None:
            nonlocal done
            while True:
                await client.generate(token_ids=prompt(6, number), max_tokens=3, priority="high")
                done += 1

        feeders = [asyncio.create_task(keep_asking(n)) for n in range(8)]
        await asyncio.sleep(PULL_S + 0.2)  # until the pulls are over that began when nobody asked
        before = done
        low = await client.generate(token_ids=prompt(9), max_tokens=4, priority="low")
        assert list(low.token_ids) == completion(prompt(9), 4)
        assert done > before, "the load was not endless"
        # What was taken before it, its turn coming twice (a pull may find no room), and what runs beside it.
        assert done - before <= 3 * SHARE + 16
        for feeder in feeders:
            feeder.cancel()
        await asyncio.gather(*feeders, return_exceptions=True)


@pytest.mark.parametrize("drafter", [True, False])
async def test_thirty_two_at_once_in_a_tight_pool_with_cancels_each_get_their_own_answer(drafter: bool) -> None:
    async with FleetRig() as rig:
        worker = await rig.decode(engine=FakeEngine(blocks=48, step_s=0.0005), max_running=12, step_tokens=48)
        await rig.prefill(chunk_tokens=32)
        if drafter:
            await rig.drafter(draft_source="auto")
        client = rig.client()
        prompts = [[*prompt(24 * (n % 2)), n, *prompt(1 + 3 * (n % 11), seed=n)] for n in range(32)]
        tasks = [
            asyncio.create_task(client.generate(token_ids=p, max_tokens=24, id=f"r{n}")) for n, p in enumerate(prompts)
        ]
        for number in range(0, 32, 5):
            await asyncio.sleep(0.01)
            with contextlib.suppress(Exception):
                await client.cancel(f"r{number}")
        for number, answer in enumerate(await asyncio.gather(*tasks)):
            wanted = completion(prompts[number], 24)
            assert list(answer.token_ids) == wanted[: len(answer.token_ids)]
            assert len(answer.token_ids) == 24 or answer.finish_reason == "cancelled"
        assert sum(t.result().finish_reason == "cancelled" for t in tasks) <= 7
        await rig.quiet()
        assert worker.allocator.in_use == 0


async def test_a_prefix_that_finds_no_blocks_is_computed_when_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not ask for prefill again and again, for blocks that are in the cache already."""
    async with FleetRig() as rig:
        decode = await rig.decode(local_prefill_tokens=4, prefill_patience_s=10.0)
        await rig.prefill()
        place, scheduler = decode.scheduler.place, decode.scheduler
        monkeypatch.setattr(scheduler, "place", lambda sequence, index: place(sequence, index) if index < 3 else None)
        async with asyncio.timeout(5):
            answer = await rig.client().generate(token_ids=prompt(61), max_tokens=5)
        assert list(answer.token_ids) == completion(prompt(61), 5)
        assert decode.counters["prefill_jobs"] == 1
