"""The rig's own promise: no worker dies unnoticed."""

from __future__ import annotations

import asyncio

import pytest

from tests.fake_engine import FakeEngine
from tests.fleet_rig import FleetRig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]


async def fail() -> None:
    raise RuntimeError("as if by itself")


async def ask_a_worker_that_dies() -> None:
    async with asyncio.timeout(5), FleetRig() as rig:
        worker = await rig.decode(engine=FakeEngine(blocks=128, step_s=0.01))
        asyncio.get_running_loop().call_later(0.1, worker.spawn, fail)
        await rig.client().generate(token_ids=[1, 2, 3], max_tokens=400)
        raise AssertionError("an answer of a dead worker")


async def test_a_dead_worker_ends_the_wait_for_its_answer_and_the_test() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await ask_a_worker_that_dies()
    assert caught.group_contains(RuntimeError, match="as if by itself")
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_killed_and_drained_workers_are_no_failure() -> None:
    async with FleetRig() as rig:
        await rig.decode("one")
        await rig.decode("two")
        await rig.kill("one")
        await rig.drain("two")
