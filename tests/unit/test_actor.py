"""Life of a worker: loud deaths, draining, one engine thread, peers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shared.actor import Actor, SideTaskEnded
from shared.bus.memory import MemoryBus
from shared.config import Settings
from shared.lifecycle import Phase, advance
from shared.messages import Beat, Identity
from shared.peers import Peers, rendezvous

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


class Worker(Actor):
    role = "decode"

    def __init__(self, task: Callable[[], Awaitable[None]]) -> None:
        super().__init__(Settings(model_name="m", beat_s=0.02), MemoryBus(), "w1")
        self.task = task
        self.drained = False

    def side_tasks(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {"only": self.task}

    async def drain(self) -> None:
        self.drained = True


async def forever() -> None:
    await asyncio.sleep(3600)


async def test_a_side_task_that_raises_stops_the_worker_with_its_error() -> None:
    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ZeroDivisionError

    with pytest.RaisesGroup(ZeroDivisionError):
        await Worker(fail).run()


async def test_a_side_task_that_returns_stops_the_worker() -> None:
    async def leave() -> None:
        await asyncio.sleep(0.01)

    with pytest.RaisesGroup(SideTaskEnded):
        await Worker(leave).run()


async def test_a_spawned_task_that_raises_stops_the_worker() -> None:
    worker = Worker(forever)

    async def fail(text: str) -> None:
        raise ValueError(text)

    running = asyncio.create_task(worker.run())
    await worker.ready.wait()
    worker.spawn(fail, "told")
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="told")):
        await running


async def test_draining_ends_cleanly() -> None:
    worker = Worker(forever)
    running = asyncio.create_task(worker.run())
    await worker.ready.wait()
    worker.draining.set()
    await running
    assert worker.drained


async def test_forward_passes_run_in_one_thread_off_the_event_loop_and_one_at_a_time() -> None:
    worker = Worker(forever)
    threads: set[int] = set()
    inside: list[int] = []

    def forward(number: int) -> int:
        threads.add(threading.get_ident())
        inside.append(1)
        assert len(inside) == 1
        time.sleep(0.02)
        inside.pop()
        return number

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    assert await asyncio.gather(*(worker.in_engine(forward, n) for n in range(5))) == list(range(5))
    ticking.cancel()
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert ticks > 5


async def test_a_busy_step_loop_can_be_stopped() -> None:
    worker = Worker(forever)

    async def steps() -> None:
        while True:
            await worker.in_engine(time.sleep, 0.01)

    worker.task = steps
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(0.1)
    worker.draining.set()
    await asyncio.wait_for(running, 2)


def beat(worker: str, **fields: Any) -> Beat:
    return Beat(role="decode", worker=worker, **fields)


class TestPeers:
    def test_silence_is_death_and_a_beat_is_life(self) -> None:
        peers = Peers(3.0)
        peers.observe(beat("a"), 0.0)
        peers.observe(beat("b"), 2.0)
        assert [p.worker for p in peers.alive("decode", 2.5)] == ["a", "b"]
        assert [p.worker for p in peers.alive("decode", 4.0)] == ["b"]
        peers.observe(beat("a"), 4.5)
        assert [p.worker for p in peers.alive("decode", 4.5)] == ["a", "b"]
        assert peers.alive("prefill", 4.5) == []

    def test_a_draining_peer_is_not_asked(self) -> None:
        peers = Peers(3.0)
        peers.observe(beat("a", draining=True), 0.0)
        assert peers.alive("decode", 0.0) == []

    def test_a_difference_is_named_once_and_excludes(self) -> None:
        peers = Peers(3.0)
        mine = Identity(fingerprint="f", codec="none", block_size=16, block_bytes=64)
        other = beat("a", identity=mine.model_copy(update={"block_size": 32}))
        peers.observe(other, 0.0)
        assert peers.mismatch(other, mine, "v") == ["block_size: 16 here, 32 there"]
        assert peers.mismatch(other, mine, "v") == []
        assert peers.alive("decode", 0.0) == []
        same = beat("a", identity=mine)
        peers.observe(same, 0.1)
        assert peers.mismatch(same, mine, "v") == []
        assert len(peers.alive("decode", 0.1)) == 1

    def test_rendezvous_moves_only_the_keys_of_who_left(self) -> None:
        before = {str(k): rendezvous(str(k), ["a", "b", "c"]) for k in range(300)}
        after = {k: rendezvous(k, ["a", "c"]) for k in before}
        assert all(after[k] == v for k, v in before.items() if v != "b")
        assert {before[k] for k in before} == {"a", "b", "c"}
        assert rendezvous("x", []) is None


def test_phases_follow_the_table() -> None:
    assert advance(Phase.WAITING, Phase.LOADING) is Phase.LOADING
    with pytest.raises(ValueError, match="waiting to ready"):
        advance(Phase.WAITING, Phase.READY)
    for phase in Phase:
        with pytest.raises(ValueError, match="from ended"):
            advance(Phase.ENDED, phase)
