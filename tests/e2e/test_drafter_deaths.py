"""Decode workers and drafters as users start them; drafters are killed and stopped in mid-stream.

The models are tiny ones with random weights, and all drafts are right: the draft model is the model itself, and the
draft head is one that knows what its target does.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders

from shared.bus.base import Bus
from shared.bus.nats import NatsBus
from shared.messages import Beat, Sampling
from shared.subjects import Subjects
from tests import draft_release, tiny_models
from tests.e2e.gold import Gold, check
from trine.beats import listen
from trine.client import Client
from trine.completion import Completion
from trine.supervisor import Fleet

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(150)]

LAYERS = 4
MODEL: dict[str, Any] = {
    **tiny_models.ARCHITECTURES["llama"],
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
}
LENGTH = 250
TEMPERATURES = (0.0, 0.0, 0.7, 1.2)
"""Of the streams that run all the time."""
PATIENCE_S = 30.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tiny_models.write(tmp_path / "tiny", MODEL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()  # workers do not start without one
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def fleet(folder: Path) -> Iterator[Fleet]:
    with fleet_of(folder, 2, {"TRINE_DRAFTER_LAYERS": str(LAYERS)}) as fleet:
        yield fleet


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A model, and beside it in `release` the draft head that knows it."""
    folder = tmp_path / "known"
    draft_release.write_perfect(folder, tmp_path / "release", vocab=tiny_models.VOCAB, context=1024, eos_token_id=None)
    return folder


@pytest.fixture
def headed(known: Path) -> Iterator[Fleet]:
    with fleet_of(known, 1, {"TRINE_DRAFTER_MODEL": str(known.parent / "release")}) as fleet:
        yield fleet


@contextlib.contextmanager
def fleet_of(folder: Path, count: int, drafter: dict[str, str]) -> Iterator[Fleet]:
    """So many decode workers and drafters, ready."""
    env = {
        "TRINE_MODEL": str(folder),
        "TRINE_KV_MEMORY_MB": "32",
        "TRINE_BEAT_S": "0.2",
        "TRINE_PEER_TIMEOUT_S": "2",
        "TRINE_DRAIN_S": "0.5",
        "TRINE_LOG_FORMAT": "json",
    }
    decode = {"TRINE_DRAFT_ADAPTIVE": "false", "TRINE_DRAFT_WAIT_MS": "500", "TRINE_DRAFT_DEPTH": "4"}
    role_env = {"decode": decode, "drafter": {"TRINE_DRAFT_SOURCE": "model", **drafter}}
    with Fleet({"decode": count, "drafter": count}, env=env, role_env=role_env) as fleet:
        fleet.wait_ready(60)
        yield fleet


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, tiny_models.VOCAB) for _ in range(20 + number)]


@dataclass
class Load:
    """Streams one after another in as many places as there are temperatures, and what came of them."""

    fleet: Fleet
    bus: Bus
    answers: list[tuple[int, Completion]]
    tokens: int = 0
    counter: str = "drafted_model"
    """Of a drafter's beat."""

    async def place(self, client: Client, number: int) -> None:
        while True:
            stream = client.stream(
                token_ids=prompt(number), max_tokens=LENGTH, temperature=TEMPERATURES[number], seed=number
            )
            async for delta in stream:
                self.tokens += len(delta.token_ids)
            self.answers.append((number, stream.completion))

    async def until(self, holds: Callable[[dict[str, Beat]], bool]) -> dict[str, Beat]:
        """Wait for beats for which that is true; returns them."""
        found: dict[str, Beat] = {}

        def enough(seen: dict[tuple[str, str], Beat]) -> bool:
            found.update({worker: beat for (_, worker), beat in seen.items()})
            return holds(found)

        await listen(self.bus, PATIENCE_S, Subjects(self.fleet.model).beats, enough)
        assert holds(found), {name: dict(beat.counters) for name, beat in found.items()}
        return found

    async def drafts_by(self, *drafters: str) -> None:
        """Wait until each has made some more and both decode workers found some more to be right."""
        decoders = [f"decode-{n + 1}" for n in range(self.fleet.counts["decode"])]
        counters = {**dict.fromkeys(drafters, self.counter), **dict.fromkeys(decoders, "accepted_tokens")}
        before = await self.until(lambda beats: counters.keys() <= beats.keys())
        counts = {name: before[name].counters.get(counter, 0) for name, counter in counters.items()}
        await self.until(
            lambda beats: all(
                name in beats and not counts[name] <= beats[name].counters.get(counter, 0) < counts[name] + 40
                for name, counter in counters.items()
            )
        )

    async def goes_on_without(self) -> None:
        """Wait until many tokens came and not one draft was verified."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                drafted, tokens = await self._drafted(), self.tokens
                while self.tokens < tokens + 100:
                    await asyncio.sleep(0.02)
                if await self._drafted() == drafted:
                    return

    async def _drafted(self) -> list[int]:
        beats = await listen(self.bus, 0.5, f"{Subjects(self.fleet.model).prefix}.beat.decode.*")
        return sorted(beat.counters["drafted_tokens"] for beat in beats.values())


@contextlib.asynccontextmanager
async def load(fleet: Fleet) -> AsyncIterator[Load]:
    bus = await NatsBus.connect(fleet.url, name="test", wait=5)
    async with Client(fleet.url, fleet.model) as client:
        now = Load(fleet, bus, [])
        places = [asyncio.create_task(now.place(client, number)) for number in range(len(TEMPERATURES))]
        try:
            yield now
        finally:
            for task in places:
                task.cancel()
            ends = await asyncio.gather(*places, return_exceptions=True)
            await bus.close()
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


def texts_are_right(now: Load, folder: Path) -> None:
    gold = Gold(folder)
    for number, answer in now.answers:
        assert answer.usage.completion_tokens == len(answer.token_ids) == LENGTH
        sampling = Sampling(temperature=TEMPERATURES[number], seed=number)
        check(gold.divergences(prompt(number), answer.token_ids, sampling, answer.seed), f"stream {number}")
    assert {number for number, _ in now.answers} == set(range(len(TEMPERATURES)))


async def test_case_51_either_drafter_killed_and_the_other_stopped(fleet: Fleet, folder: Path) -> None:
    """Streams go on, other drafters take over, drafts come again; all texts are those of plain `transformers`."""
    async with load(fleet) as now:
        await now.drafts_by("drafter-1", "drafter-2")
        fleet.hold("drafter-1")
        fleet.kill("drafter-1")
        await now.drafts_by("drafter-2")
        fleet.kill("drafter-2", signal.SIGSTOP)
        try:
            await now.goes_on_without()
            fleet.release("drafter-1")
            await now.drafts_by("drafter-1")
        finally:
            fleet.kill("drafter-2", signal.SIGCONT)
        await now.drafts_by("drafter-1", "drafter-2")
        fleet.kill("drafter-2")
        await now.drafts_by("drafter-1")
    texts_are_right(now, folder)
    assert [fleet.restarts()[name] for name in ("decode-1", "decode-2", "drafter-1")] == [0, 0, 1]


async def test_case_51_a_draft_head_dies_and_another_takes_over(headed: Fleet, known: Path) -> None:
    """A release as users name it: hidden states go to it, and again to the one that comes after it."""
    async with load(headed) as now:
        now.counter = "drafted_head"
        await now.drafts_by("drafter-1")
        headed.hold("drafter-1")
        headed.kill("drafter-1")
        await now.goes_on_without()
        headed.release("drafter-1")
        await now.drafts_by("drafter-1")
        async with asyncio.timeout(PATIENCE_S):
            while len({number for number, _ in now.answers}) < len(TEMPERATURES):
                await asyncio.sleep(0.05)
    texts_are_right(now, known)
