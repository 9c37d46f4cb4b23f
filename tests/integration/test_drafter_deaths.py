"""Drafters that come late, die, freeze, wake or lie: processes of their own, a real nats-server between them.

The texts are those without a drafter, which the fake engines' are by construction: the next token is a hash of all
tokens before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import subprocess
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from shared.bus.base import Incoming
from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.codec import decode, encode
from shared.messages import Beat, DraftAsk
from shared.peers import rendezvous
from shared.tenants import DEFAULT_TENANT, request_key
from tests.block_faults import prompt
from tests.draft_forgeries import FORGERIES
from tests.fake_engine import completion
from tests.fleet_rig import MODEL
from tests.nats_fleet import SUBJECTS, beat_when, worker_process
from trine.client import Client
from trine.stream import Stream

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

DECODERS = ("decode-1", "decode-2")
DRAFTERS = ("drafter-1", "drafter-2")
ENGINE: dict[str, Any] = {"width": 1, "blocks": 2000, "block_size": 16, "context": 8000}
COMMON: dict[str, Any] = {"block_size": 16, "beat_s": 0.05, "peer_timeout_s": 0.8}
STEP_S = 0.03
PER_WORKER = 3
LENGTH = 6000
"""Longer than any of the tests: they end their streams themselves."""
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server with two decode workers, each full with half of the streams."""
    with EmbeddedNats() as nats, contextlib.ExitStack() as stack:
        for name in DECODERS:
            engine = {**ENGINE, "step_s": STEP_S}
            settings = {**COMMON, "max_running": PER_WORKER, "draft_depth": 3, "draft_wait_ms": 100}
            stack.enter_context(worker_process("decode", nats.url, name, engine=engine, **settings))
        yield nats.url


@dataclass
class Scene:
    """Streams that run, and drafters that come and go beside them."""

    url: str
    bus: NatsBus
    client: Client
    stack: contextlib.AsyncExitStack
    drafters: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def begin(self, ids: Collection[str]) -> None:
        for number, name in enumerate(ids):
            self.prompts[name] = prompt(30, seed=number)
            self.tokens[name] = []
            self.streams[name] = self.client.stream(token_ids=self.prompts[name], max_tokens=LENGTH, id=name)
            self._tasks.append(asyncio.create_task(self._consume(name)))
        await self.all_go_on()

    async def _consume(self, name: str) -> None:
        async for delta in self.streams[name]:
            assert delta.index == len(self.tokens[name]), "a token is missing or doubled"
            self.tokens[name] += delta.token_ids

    async def end(self) -> None:
        """All of them, after comparing what they said."""
        for name in self.streams:
            await self.client.cancel(name)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self._tasks)
        for name, tokens in self.tokens.items():
            assert self.streams[name].completion.finish_reason == "cancelled"
            assert tokens == completion(self.prompts[name], len(tokens)), name

    async def start(self, name: str) -> None:
        process = worker_process("drafter", self.url, name, engine=ENGINE, **COMMON)
        self.drafters[name] = await asyncio.to_thread(self.stack.enter_context, process)

    async def all_go_on(self, tokens: int = 8) -> None:
        """Wait until each stream has so many tokens more."""
        before = {name: len(said) for name, said in self.tokens.items()}
        async with asyncio.timeout(PATIENCE_S):
            while any(len(self.tokens[name]) < count + tokens for name, count in before.items()):
                await asyncio.sleep(0.01)
                assert not any(task.done() for task in self._tasks), "one has ended by itself"

    async def counts(self, counter: str) -> dict[str, int]:
        """Of both decode workers, as their beats say."""
        beats = [await beat_when(self.bus, name, lambda _: True) for name in DECODERS]
        return {beat.worker: beat.counters.get(counter, 0) for beat in beats}

    async def count_reaches(self, counter: str, count: int) -> None:
        """Wait until it does, of both together."""
        async with asyncio.timeout(PATIENCE_S):
            while sum((await self.counts(counter)).values()) < count:
                await self.all_go_on(1)

    async def drafts_come(self, accepted: int = 20) -> None:
        """Wait until so many more came true at both decode workers."""
        wanted = {name: count + accepted for name, count in (await self.counts("accepted_tokens")).items()}
        for name in DECODERS:
            await beat_when(self.bus, name, lambda b: b.counters.get("accepted_tokens", 0) >= wanted[b.worker])

    async def no_draft_comes(self) -> None:
        """Wait until streams go on without any."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                before = await self.counts("drafted_tokens")
                await self.all_go_on()
                if await self.counts("drafted_tokens") == before:
                    return

    async def asked(self, drafter: str, ids: Collection[str]) -> None:
        """Wait until decode workers ask this drafter about all these requests."""
        left, done = {request_key(DEFAULT_TENANT, name) for name in ids}, asyncio.Event()

        async def look(message: Incoming) -> None:
            left.difference_update(item.session for item in decode(message.data, DraftAsk).items)
            if not left:
                done.set()

        subscription = await self.bus.subscribe(SUBJECTS.draft(drafter), look)
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
        await subscription.unsubscribe()


@contextlib.asynccontextmanager
async def scene(url: str) -> AsyncIterator[Scene]:
    async with contextlib.AsyncExitStack() as stack:
        bus = await NatsBus.connect(url, name="test", wait=5)
        stack.push_async_callback(bus.close)
        yield Scene(url, bus, await stack.enter_async_context(Client(url, MODEL)), stack)


def belonging(drafters: Collection[str], kind: str) -> dict[str, list[str]]:
    """Ids of requests that are each drafter's when all of these live, as many for each as one decode worker serves."""
    ids = [f"{kind}-{number}" for number in range(200)]
    owners = {name: rendezvous(request_key(DEFAULT_TENANT, name), list(drafters)) for name in ids}
    return {drafter: [name for name in ids if owners[name] == drafter][:PER_WORKER] for drafter in drafters}


@pytest.mark.parametrize("victim", [DRAFTERS[0], pytest.param(DRAFTERS[1], marks=pytest.mark.slow)])
async def test_case_51_drafters_come_die_freeze_and_return_beside_streams_that_go_on(url: str, victim: str) -> None:
    """No drafter at first; then two, of which one is killed and the other stopped; each is back some time later."""
    (other,) = set(DRAFTERS) - {victim}
    theirs = belonging(DRAFTERS, victim)
    everybody = [*theirs[victim], *theirs[other]]
    async with scene(url) as now:
        await now.begin(everybody)
        await now.no_draft_comes()
        await asyncio.gather(*(now.start(name) for name in DRAFTERS))
        await asyncio.gather(*(now.asked(name, theirs[name]) for name in DRAFTERS), now.drafts_come())

        now.drafters[victim].kill()
        await now.asked(other, everybody)
        await now.drafts_come()

        now.drafters[other].send_signal(signal.SIGSTOP)
        await now.no_draft_comes()

        await now.start(victim)
        await now.asked(victim, everybody)
        await now.drafts_come()

        now.drafters[other].send_signal(signal.SIGCONT)
        await now.asked(other, theirs[other])
        await now.drafts_come()

        await now.end()
        for stream in now.streams.values():
            by = {name.partition(":")[0] for name in stream.completion.served_by.drafter}
            assert by == set(DRAFTERS), "each drafted for it while the other was away"
            usage = stream.completion.usage
            assert usage.accepted_tokens > 0.9 * usage.drafted_tokens, "as good after a move as before"


async def test_case_53_a_forger_beside_an_honest_drafter(url: str) -> None:
    """Its sessions get nothing from it but forgeries, which beats count; when it is gone they find the other."""
    theirs = belonging(("forger", "drafter-1"), "forged")
    forgeries = itertools.cycle(FORGERIES[name] for name in ("ids beyond the vocabulary", "garbage", "another request"))
    async with scene(url) as now:

        async def forge(message: Incoming) -> None:
            item = decode(message.data, DraftAsk).items[0]
            for data in next(forgeries).answers(item):
                await now.bus.publish(message.reply, data)

        async def beats() -> None:
            beat = encode(Beat(role="drafter", worker="forger", vocabulary="fake-vocabulary"))
            while True:
                await now.bus.publish(SUBJECTS.beat("drafter", "forger"), beat)
                await asyncio.sleep(COMMON["beat_s"])

        await now.start("drafter-1")
        before = {counter: await now.counts(counter) for counter in ("bad_drafts", "drafts_ignored")}
        subscription = await now.bus.subscribe(SUBJECTS.draft("forger"), forge)
        alive = asyncio.create_task(beats())
        await now.begin([*theirs["forger"], *theirs["drafter-1"]])
        for counter, counts in before.items():
            await now.count_reaches(counter, sum(counts.values()) + 2)
        alive.cancel()
        await subscription.unsubscribe()
        await now.asked("drafter-1", theirs["forger"])
        await now.drafts_come()
        await now.end()
