"""More requests than a fleet can serve, and requests that nobody waits for, over a real server. Cases 60, 61, 122."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from services.decode.service import DecodeWorker
from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.codec import encode
from shared.engine.span import Span
from shared.errors import DeadlineExceeded, Overloaded
from shared.messages import Generate
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL
from tests.nats_fleet import SUBJECTS, NatsFleet
from trine.client import Client

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
BLOCKS = 64
REQUESTS = 500
TOKENS = 20
STEP_S = 0.02
PATIENT_S, HURRIED_S, LEAVES_S = 5.0, 0.6, 0.3
SLACK_S = 0.5
"""By so much may a client be told later than it should, beside what `probe` finds."""


@pytest.fixture
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as running:
        yield running


class CountingEngine(FakeEngine):
    """Remembers when the first step came for each prompt, which its first token names."""

    def __init__(self, step_s: float) -> None:
        super().__init__(blocks=BLOCKS, step_s=step_s)
        self.first_step: dict[int, float] = {}

    def step(self, spans: Sequence[Span]) -> list[list[int]]:
        for span in spans:
            if span.start == 0:
                self.first_step.setdefault(span.token_ids[0], time.monotonic())
        return super().step(spans)


def prompt(number: int) -> list[int]:
    return [number, 7, 7]


async def full_pool(client: Client) -> None:
    """One request that needs every block there is."""
    tokens = [3] * (4 * BLOCKS - 8)
    answer = await client.generate(token_ids=tokens, max_tokens=8, deadline_ms=8000)
    assert list(answer.token_ids) == completion(tokens, 8)


async def idle(rig: NatsFleet, within: float) -> None:
    """No worker serves anything, no block is in use, nothing is queued."""
    workers = [w for w in rig.workers.values() if isinstance(w, DecodeWorker)]
    bus = await NatsBus.connect(rig.url, name="test", wait=5.0)
    async with asyncio.timeout(within):
        while (
            any(w.load().running or w.load().waiting or w.allocator.in_use for w in workers)
            or (await bus.stream_state(SUBJECTS.request_stream)).messages
        ):
            await asyncio.sleep(0.02)
    await bus.close()
    for worker in workers:
        worker.scheduler.check_integrity()


async def probe(url: str, slowest: list[float]) -> None:
    """How long the server takes to answer anything: the clients, their workers and the test share a core, and this
    process one event loop.
    """
    bus = await NatsBus.connect(url, name="probe", wait=5.0)
    try:
        while True:
            started = time.monotonic()
            await bus.stream_state(SUBJECTS.request_stream)
            slowest[0] = max(slowest[0], time.monotonic() - started)
            await asyncio.sleep(0.01)
    finally:
        await bus.close()


@dataclass
class Burst:
    """What became of each request, by number."""

    right: set[int] = field(default_factory=set)
    refused: dict[int, float] = field(default_factory=dict)
    """When to ask again."""
    gone: dict[int, float] = field(default_factory=dict)
    """When the client had no use for an answer any more."""
    late: list[tuple[float, str]] = field(default_factory=list)
    """By how much, and who was told what."""

    async def ask(self, client: Client, number: int) -> None:
        deadline = HURRIED_S if number % 5 == 0 else PATIENT_S
        started = time.monotonic()
        try:
            async with asyncio.timeout(LEAVES_S if number % 7 == 0 else None):
                answer = await client.generate(
                    token_ids=prompt(number), max_tokens=TOKENS, deadline_ms=int(deadline * 1e3)
                )
        except Overloaded as error:
            self.refused[number] = error.retry_after_s or 0.0
            self._within(number, started, 1.0, "refused")
        except DeadlineExceeded:
            self.gone[number] = started + deadline
            self._within(number, started, deadline, "told that it is too late")
        except TimeoutError:
            self.gone[number] = time.monotonic()
        else:
            assert list(answer.token_ids) == completion(prompt(number), TOKENS)
            self.right.add(number)
            self._within(number, started, deadline, "answered")

    def _within(self, number: int, started: float, most: float, what: str) -> None:
        took = time.monotonic() - started
        self.late.append((took - most, f"{number} was {what} after {took:.2f} s"))


async def test_500_at_once_on_a_fleet_that_serves_8(server: EmbeddedNats) -> None:
    """Case 122. Who comes too late is told so at once, and when to come again; nobody works for those who have left."""
    burst = Burst()
    async with NatsFleet(server.url) as rig, AsyncExitStack() as stack:
        engines = [CountingEngine(STEP_S) for _ in range(2)]
        for number, engine in enumerate(engines, 1):
            await rig.decode(f"decode-{number}", engine, max_running=4, max_queued=40)
        clients = [await stack.enter_async_context(Client(server.url, MODEL)) for _ in range(10)]
        slowest = [0.0]
        probing = asyncio.create_task(probe(server.url, slowest))
        await asyncio.gather(*(burst.ask(clients[n // 50], n) for n in range(REQUESTS)))
        probing.cancel()
        await asyncio.wait([probing])

        assert len(burst.right) >= 8  # those that run at once; how many more depends on the machine
        assert len(burst.refused) >= REQUESTS / 2
        assert len(burst.right) + len(burst.refused) + len(burst.gone) == REQUESTS
        assert all(0 < wait <= 60 for wait in burst.refused.values())
        assert max(burst.refused.values()) > 2 * min(burst.refused.values()), "all would come again at one moment"

        first_step = {number: at for engine in engines for number, at in engine.first_step.items()}
        assert first_step.keys() <= burst.right | burst.gone.keys()
        heard = 0.1 + 3 * slowest[0]  # a cancel takes the same way as a question to the server
        assert {n for n, at in burst.gone.items() if first_step.get(n, at) > at + heard} == set(), "served for nobody"
        assert burst.gone.keys() - first_step.keys(), "all those that left were being served already"

        by, told = max(burst.late)
        assert by <= SLACK_S + 3 * slowest[0], f"{told}; the server answered within {slowest[0]:.2f} s"

        await idle(rig, 2.0)
        await full_pool(clients[0])
        await idle(rig, 2.0)


async def test_who_is_told_when_to_come_again_finds_room_then(server: EmbeddedNats) -> None:
    """Case 122. The queue stays full; the wait is about as long as it takes to serve those that were told before."""
    async with NatsFleet(server.url) as rig, Client(server.url, MODEL) as client:
        await rig.decode("decode-1", CountingEngine(STEP_S), max_running=4, max_queued=8)

        async def ask(number: int) -> int:
            """How often it was refused."""
            for refusals in range(20):
                try:
                    answer = await client.generate(token_ids=prompt(number), max_tokens=TOKENS)
                except Overloaded as error:
                    await asyncio.sleep(error.retry_after_s or 0.0)
                else:
                    assert list(answer.token_ids) == completion(prompt(number), TOKENS)
                    return refusals
            raise AssertionError("it was told to come again and again")

        refusals = await asyncio.gather(*(ask(number) for number in range(16)))
        assert sum(refusals) >= 8, "the queue was not full"
        assert max(refusals) <= 8
        await idle(rig, 2.0)


@pytest.mark.slow
async def test_500_cancelled_at_any_moment_leave_nothing_behind(server: EmbeddedNats) -> None:
    """Case 60: streams and whole answers; cancelled, left, or dropped with the task that waits for them."""
    rng = random.Random(60)
    async with NatsFleet(server.url) as rig, Client(server.url, MODEL) as client:
        for number in (1, 2):
            await rig.decode(f"decode-{number}", CountingEngine(0.002), max_running=16)
        gate = asyncio.Semaphore(64)

        async def streamed(number: int) -> None:
            async with client.stream(token_ids=prompt(number), max_tokens=150) as stream:
                most, had = rng.randrange(25), 0
                async for delta in stream:
                    had += len(delta.token_ids)
                    if had > most and number % 4 == 0:
                        return
                    if had > most:
                        await stream.cancel()

        async def whole(number: int) -> None:
            task = asyncio.create_task(client.generate(token_ids=prompt(number), max_tokens=150, id=f"r{number}"))
            await asyncio.sleep(rng.random() * 0.1)
            if number % 4 == 1:
                task.cancel()
            else:
                await client.cancel(f"r{number}")
            with contextlib.suppress(asyncio.CancelledError):
                assert (await task).finish_reason == "cancelled"

        async def one(number: int) -> None:
            async with gate:
                await (whole(number) if number % 2 else streamed(number))

        await asyncio.gather(*(one(number) for number in range(REQUESTS)))
        await idle(rig, 10.0)
        await full_pool(client)
        await idle(rig, 2.0)


async def test_200_abandoned_as_they_arrive_keep_nobody_busy(server: EmbeddedNats) -> None:
    """Case 61: the cancel comes 0 to 5 ms after the request, before it, with it or just after a worker has it."""
    rng = random.Random(61)
    async with NatsFleet(server.url) as rig, Client(server.url, MODEL) as client:
        engine = CountingEngine(0.02)  # 5 s for a whole answer
        await rig.decode("decode-1", engine, max_running=16)
        bus = await NatsBus.connect(server.url, name="test", wait=5.0)
        for number in range(200):
            request = Generate(id=f"r{number}", token_ids=prompt(number), max_tokens=250)
            await bus.publish(SUBJECTS.request("normal"), encode(request))
            await asyncio.sleep(rng.random() * 0.005)
            await bus.publish(SUBJECTS.cancel(request.id), b"")
        await idle(rig, 2.0)
        steps = engine.steps
        await asyncio.sleep(0.1)
        assert engine.steps == steps
        await full_pool(client)
        await bus.close()
