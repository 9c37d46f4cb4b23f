"""Requests that workers do not survive, and those that only seem to be such."""

from __future__ import annotations

import asyncio
import random

import pytest

from shared.errors import InvalidField, NotKept, Poison, UnknownModel
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL, FleetRig
from trine.client import Client
from trine.completion import Completion
from trine.dead import dead, find, retry

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
PROMPT = random.Random(1).sample(range(1000), 120)
SLOW = {"step_tokens": 4, "local_prefill_tokens": 1000}
"""With a slow engine: the prompt takes a second."""


def engine() -> FakeEngine:
    return FakeEngine(blocks=128, step_s=0.04)


async def serves(rig: FleetRig) -> str:
    """The worker that has gone to work on the request."""
    async with asyncio.timeout(5):
        while True:
            for name, worker in rig.workers.items():
                if worker.load().running:
                    return name
            await asyncio.sleep(0.01)


async def ended(rig: FleetRig, deaths: int) -> list[str]:
    """Kill so many workers at work on the request, one after another."""
    victims = []
    for _ in range(deaths):
        victims.append(await serves(rig))
        await rig.decode(f"after-{victims[-1]}", engine(), **SLOW)
        await rig.kill(victims[-1])
    return victims


def ask(client: Client, tokens: list[int] = PROMPT, **more: str) -> asyncio.Task[Completion]:
    return asyncio.create_task(client.generate(token_ids=tokens, max_tokens=5, **more))  # type: ignore[arg-type]


async def test_two_deaths_without_a_token_are_enough_and_one_is_not() -> None:
    async with FleetRig() as rig:
        await rig.decode("decode-1", engine(), **SLOW)
        once = ask(rig.client())
        await ended(rig, 1)
        assert list((await once).token_ids) == completion(PROMPT, 5)
        assert await dead(rig.bus(), MODEL) == []

        tokens = PROMPT[::-1]  # nothing of it is in the cache yet
        twice = ask(rig.client(), tokens, id="r")
        victims = await ended(rig, 2)
        with pytest.raises(Poison) as caught:
            await twice
        assert all(name in caught.value.message for name in victims)
        [letter] = await dead(rig.bus(), MODEL)
        assert (letter.tenant, letter.id, letter.priority) == ("default", "r", "normal")
        assert (letter.attempts, letter.workers, letter.code) == (2, victims, "poison")
        await rig.quiet()

        assert await retry(rig.bus(), MODEL, "r") == 3
        assert await dead(rig.bus(), MODEL) == []
        await serves(rig)
        await rig.quiet()
        answer = rig.client().resume("r")
        async for _ in answer:
            pass
        assert list(answer.completion.token_ids) == completion(tokens, 5)
        for call in (find, retry):
            with pytest.raises(NotKept):
                await call(rig.bus(), MODEL, "r")


async def test_a_token_between_two_deaths_forgives_the_first() -> None:
    async with FleetRig() as rig:
        await rig.decode("decode-1", engine(), **SLOW)
        stream = rig.client().stream(token_ids=PROMPT, max_tokens=20)
        tokens: list[int] = []
        counts = [6, 12]  # of tokens, and not one more when the next worker dies

        async def read() -> None:
            async for delta in stream:
                tokens.extend(delta.token_ids)
                if counts and len(tokens) >= counts[0]:
                    counts.pop(0)
                    await ended(rig, 1)

        reading = asyncio.create_task(read())
        await ended(rig, 1)
        await reading
        assert tokens == completion(PROMPT, 20)
        assert counts == []


async def test_drained_workers_hand_back_and_nobody_is_blamed() -> None:
    async with FleetRig() as rig:
        await rig.decode("decode-1", engine(), **SLOW, drain_s=0)
        asked = ask(rig.client())
        for number in range(4):
            name = await serves(rig)
            await rig.decode(f"spare-{number}", engine(), **SLOW, drain_s=0)
            await rig.drain(name)
            await rig.kill(name)
        assert list((await asked).token_ids) == completion(PROMPT, 5)
        assert await dead(rig.bus(), MODEL) == []


async def test_bystanders_of_many_deaths_are_tried_apart_and_answered() -> None:
    """All of them were at work in a worker that died. The next that dies while one is tried is that one's doing."""
    async with FleetRig() as rig:
        await rig.decode("decode-1", engine(), **SLOW)
        client = rig.client()
        asked = [asyncio.create_task(client.generate(token_ids=PROMPT[n:], max_tokens=3)) for n in range(5)]
        await serves(rig)
        await asyncio.sleep(0.1)
        spare = await rig.decode("spare", FakeEngine(blocks=128, step_s=0.005))
        await rig.kill("decode-1")
        untold = 0
        while not all(task.done() for task in asked):
            tried = [r for r in spare._desk.requests.values() if r.sequence in spare.scheduler.live() and not r.here]
            untold = max(untold, sum(r.suspect for r in tried))
            assert len(tried) <= 1 or not any(r.suspect for r in tried)
            await asyncio.sleep(0.002)
        assert untold == 1
        for n, task in enumerate(asked):
            assert list(task.result().token_ids) == completion(PROMPT[n:], 3)
        await rig.quiet()


async def test_who_waits_for_a_trial_can_be_cancelled_and_expires() -> None:
    async with FleetRig() as rig:
        await rig.decode("decode-1", engine(), **SLOW)
        client = rig.client()
        first, second = (ask(client, id=name) for name in "ab")
        await serves(rig)
        await asyncio.sleep(0.2)
        spare = await rig.decode("spare", engine(), **SLOW)
        await rig.kill("decode-1")
        async with asyncio.timeout(5):
            while not spare._desk.lines_up:
                await asyncio.sleep(0.01)
        [waiting] = [r for r in spare._desk.requests.values() if r.sequence not in spare.scheduler.live()]
        await client.cancel(waiting.generate.id)
        results = {task.result().finish_reason for task in (await asyncio.wait([first, second]))[0]}
        assert results == {"cancelled", "length"}
        await rig.quiet()


async def test_what_operators_ask_for_in_vain() -> None:
    async with FleetRig() as rig:
        with pytest.raises(UnknownModel):
            await dead(rig.bus(), MODEL)
        await rig.decode()
        for id_ in ("none", "a.b"):
            with pytest.raises(NotKept):
                await find(rig.bus(), MODEL, id_)
        with pytest.raises(InvalidField):
            await find(rig.bus(), MODEL, "")
