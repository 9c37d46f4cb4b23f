"""Drafting as deep as pays, with real services: whatever a drafter does, the text stays and little time is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from services.decode.service import DecodeWorker
from shared.bus.base import Incoming
from shared.codec import decode, encode
from shared.engine.base import Sampled
from shared.engine.span import Span
from shared.messages import Beat, Draft, DraftAsk, Drafts
from shared.subjects import Subjects
from tests.fake_engine import HIDDEN, FakeEngine, completion, hidden_state
from tests.fleet_rig import MODEL, FleetRig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

STEP_S = 0.01


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


class Puppet:
    """A drafter that knows the target's words, and does with them what a test wants."""

    def __init__(
        self, rig: FleetRig, *, wrong: bool = False, twice: bool = False, late_s: float = 0.0, reads: int = 0
    ) -> None:
        self._bus = rig.bus("puppet")
        self._subjects = Subjects(MODEL)
        self._wrong, self._twice, self._late_s, self._reads = wrong, twice, late_s, reads
        self._tokens: dict[str, list[int]] = {}
        self.running = asyncio.Event()
        self.running.set()
        self.asks = 0
        self.told: list[tuple[list[int], bytes]] = []
        """Tokens, and the hidden state sent with them."""

    @contextlib.asynccontextmanager
    async def alive(self) -> AsyncIterator[Puppet]:
        await self._bus.subscribe(self._subjects.draft("puppet"), self._on_ask)
        beats = asyncio.create_task(self._beat())
        await asyncio.sleep(0.1)
        yield self
        beats.cancel()

    async def _beat(self) -> None:
        while True:
            beat = Beat(role="drafter", worker="puppet", vocabulary="fake-vocabulary", hidden_size=self._reads)
            await self._bus.publish(self._subjects.beat("drafter", "puppet"), encode(beat))
            await asyncio.sleep(0.05)

    async def _on_ask(self, message: Incoming) -> None:
        self.asks += 1
        await self.running.wait()
        await asyncio.sleep(self._late_s)
        drafts = []
        for item in decode(message.data, DraftAsk).items:
            tokens = self._tokens[item.session] = [*self._tokens.get(item.session, [])[: item.base], *item.token_ids]
            self.told.append((tokens, item.hidden))
            guess = [(t + self._wrong) % 1000 for t in completion(tokens, item.k)]
            drafts.append(Draft(session=item.session, position=len(tokens), token_ids=guess, source="words"))
        for _ in range(2 if self._twice else 1):
            await self._bus.publish(message.reply, encode(Drafts(worker="puppet", drafts=drafts)))


async def start(rig: FleetRig) -> DecodeWorker:
    return await rig.decode(engine=FakeEngine(blocks=256, step_s=STEP_S, context=900))


async def test_a_good_drafter_is_used_to_the_full() -> None:
    async with FleetRig() as rig, Puppet(rig, twice=True).alive():
        worker = await start(rig)
        answer = await rig.client().generate(token_ids=prompt(30), max_tokens=200)
        assert list(answer.token_ids) == completion(prompt(30), 200)
        assert answer.usage.accepted_tokens == answer.usage.drafted_tokens > 120
        assert rig.engines["decode-1"].steps < 90
        assert (worker.counters["drafted_tokens"], worker.counters["accepted_tokens"]) == (
            answer.usage.drafted_tokens,
            answer.usage.accepted_tokens,
        )
        assert worker.counters["cut_drafts"] == 0


async def test_one_that_is_always_wrong_is_soon_left_alone_but_not_forgotten() -> None:
    async with FleetRig() as rig, Puppet(rig, wrong=True).alive() as puppet:
        worker = await start(rig)
        client = rig.client()
        first = await client.generate(token_ids=prompt(30), max_tokens=100)
        asks = puppet.asks
        second = await client.generate(token_ids=prompt(30, 1), max_tokens=100)
        assert [list(a.token_ids) for a in (first, second)] == [completion(prompt(30, n), 100) for n in (0, 1)]
        assert first.usage.accepted_tokens == second.usage.accepted_tokens == 0
        assert first.usage.drafted_tokens < 60
        assert second.usage.drafted_tokens < 12
        assert 0 < puppet.asks - asks < 50
        assert worker.counters["draft_probes"] > 0


async def test_one_that_freezes_costs_one_wait_and_is_back_when_it_wakes() -> None:
    async with FleetRig() as rig, Puppet(rig).alive() as puppet:
        worker = await start(rig)
        stream = rig.client().stream(token_ids=prompt(30), max_tokens=600)
        tokens: list[int] = []
        froze = woke = 0.0
        steps = {"frozen": 0, "awake": 0}
        async for delta in stream:
            tokens += delta.token_ids
            if len(tokens) > 60 and not froze:
                puppet.running.clear()
                froze, steps["frozen"] = time.monotonic(), rig.engines["decode-1"].steps
            elif froze and not woke and time.monotonic() - froze > 1.2:
                puppet.running.set()
                woke, steps["awake"] = time.monotonic(), rig.engines["decode-1"].steps
                drafted = worker.counters["drafted_tokens"]
        assert tokens == completion(prompt(30), 600)
        assert woke, "the answer was over too early"
        assert worker.counters["draft_misses"] <= 2
        assert steps["awake"] - steps["frozen"] > 0.4 * (woke - froze) / STEP_S
        assert worker.counters["drafted_tokens"] > drafted + 100


async def test_drafts_that_always_come_too_late_are_not_waited_for() -> None:
    async with FleetRig() as rig, Puppet(rig, late_s=0.15).alive():
        worker = await start(rig)
        answer = await rig.client().generate(token_ids=prompt(30), max_tokens=120)
        assert list(answer.token_ids) == completion(prompt(30), 120)
        assert worker.counters["draft_misses"] <= 2
        assert answer.timings.tpot_ms < 2.5e3 * STEP_S, "a wait for each step would be six times as long"


async def test_without_one_at_first_with_one_later_and_without_again() -> None:
    async with FleetRig() as rig:
        worker = await start(rig)
        client = rig.client()
        counts = []
        for turn in range(3):
            if turn == 1:
                await rig.drafter()
            if turn == 2:
                await rig.kill("drafter-1")
            before = worker.counters["drafted_tokens"]
            answer = await client.generate(token_ids=prompt(30, turn), max_tokens=100)
            assert list(answer.token_ids) == completion(prompt(30, turn), 100)
            counts.append(worker.counters["drafted_tokens"] - before)
        assert counts[0] == counts[2] == 0
        assert counts[1] > 40


async def test_acceptance_after_a_prefix_hit_is_that_of_a_cold_prompt() -> None:
    async with FleetRig() as rig:
        await start(rig)
        await rig.drafter(engine=FakeEngine(blocks=512, context=900))
        client = rig.client()
        rates = []
        for _ in range(2):
            answer = await client.generate(token_ids=prompt(200), max_tokens=120)
            assert list(answer.token_ids) == completion(prompt(200), 120)
            rates.append(answer.usage.accepted_tokens / answer.usage.drafted_tokens)
            assert answer.usage.accepted_tokens > 50
        assert answer.usage.cached_tokens > 190
        assert abs(rates[0] - rates[1]) < 0.1


@pytest.mark.parametrize("context", [20, 60, 100])
async def test_the_end_of_the_context_of_either_model(context: int) -> None:
    """A prompt that leaves room for five tokens, and one beyond which the drafter cannot follow."""
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=64, step_s=STEP_S, context=100))
        drafter = await rig.drafter(engine=FakeEngine(blocks=64, context=context))
        client = rig.client()
        for length in (40, 95):
            answer = await client.generate(token_ids=prompt(length), max_tokens=200)
            assert list(answer.token_ids) == completion(prompt(length), 100 - length)
            assert answer.finish_reason == "length"
        assert drafter.counters["draft_errors"] == 0


class Observed(FakeEngine):
    """Knows whether anybody has asked for hidden states."""

    asked = False

    def sample(self, spans: Sequence[Span]) -> list[Sampled]:
        self.asked |= any(span.hidden for span in spans)
        return super().sample(spans)


@pytest.mark.parametrize("reads", [0, HIDDEN, 2 * HIDDEN])
async def test_a_drafter_is_sent_the_hidden_states_that_it_can_read(reads: int) -> None:
    """Drafts are right and wrong by turns, and two sequences share the steps."""
    async with FleetRig() as rig, Puppet(rig, reads=reads).alive() as puppet:
        engine = Observed(blocks=256, step_s=STEP_S / 2, context=900, wrong_every=7)
        worker = await rig.decode(engine=engine)
        while not worker.peers.alive("drafter", time.monotonic()):
            await asyncio.sleep(0.01)
        async with asyncio.TaskGroup() as group:
            for seed in (1, 2):
                group.create_task(rig.client().generate(token_ids=prompt(30, seed), max_tokens=60))
    assert len(puppet.told) > 10
    for tokens, hidden in puppet.told:
        assert hidden == (hidden_state(len(tokens) - 1, tokens[-1]) if reads == HIDDEN else b"")
    assert engine.asked == (reads == HIDDEN)
