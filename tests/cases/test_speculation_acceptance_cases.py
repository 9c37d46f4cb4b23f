"""How many drafts come true must not hang on where a sequence's KV comes from: computed, cached, restored."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from services.decode.service import DecodeWorker
from services.drafter.sources.head import HeadSource
from tests.fake_engine import FakeEngine, completion
from tests.fake_head import FakeHead
from tests.fleet_rig import FleetRig
from trine.completion import Completion

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

EAGER: dict[str, Any] = {"draft_depth": 4, "draft_wait_ms": 2000, "draft_adaptive": False}
COUNT, LENGTH = 5, 60


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(1000) for _ in range(60)]


def acceptance(answers: Sequence[Completion]) -> float:
    for number, answer in enumerate(answers):
        assert list(answer.token_ids) == completion(prompt(number), LENGTH)
        assert answer.usage.drafted_tokens > 0
    return sum(a.usage.accepted_tokens for a in answers) / sum(a.usage.drafted_tokens for a in answers)


@pytest.mark.parametrize(
    ("source", "wrong_every"), [("model", 0), ("model", 3), ("suffix", 0), ("head", 0), ("head", 7)]
)
async def test_case_50_acceptance_cold_warm_elsewhere_and_after_preemption(source: str, wrong_every: int) -> None:
    """The same prompts each time. What past outputs bring is left out: they make drafts better and better."""

    async def drafter(rig: FleetRig, name: str) -> None:
        if source == "head":
            await rig.drafter(name, source=HeadSource(FakeHead(wrong_every=wrong_every)))
        else:
            engine = FakeEngine(blocks=1000, wrong_every=wrong_every)
            await rig.drafter(name, engine, draft_source=source, history_tokens=0)

    async def ask(rig: FleetRig, at_once: bool) -> list[Completion]:
        client = rig.client()
        asking = [client.generate(token_ids=prompt(n), max_tokens=LENGTH) for n in range(COUNT)]
        return list(await asyncio.gather(*asking)) if at_once else [await one for one in asking]

    async with FleetRig() as rig:
        await rig.decode("decode-1", FakeEngine(blocks=400), **EAGER)
        await drafter(rig, "drafter-1")
        cold = await ask(rig, at_once=False)
        warm = await ask(rig, at_once=False)
        await rig.kill("decode-1")
        await rig.kill("drafter-1")
        small: DecodeWorker = await rig.decode("decode-2", FakeEngine(blocks=70), **EAGER)
        await drafter(rig, "drafter-2")
        elsewhere = await ask(rig, at_once=False)
        preempted = await ask(rig, at_once=True)
        assert small.scheduler.preemptions > 0
        await rig.quiet()
    assert all(answer.usage.cached_tokens == 0 for answer in cold)
    assert all(answer.usage.cached_tokens > 50 for answer in (*warm, *elsewhere))
    rates = {
        "cold": acceptance(cold),
        "warm": acceptance(warm),
        "elsewhere": acceptance(elsewhere),
        "preempted": acceptance(preempted),
    }
    assert max(rates.values()) - min(rates.values()) < 0.1, rates
    assert min(rates.values()) > (0.9 if source != "suffix" and not wrong_every else 0.3), rates
