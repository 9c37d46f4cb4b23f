"""The simulation against real workers on a real NATS server, whose engines compute nothing and only take their time:
`python -m benchmarks.simulate --check --paced`.

It checks what the simulation says of queues, jobs, blocks and steps, also on a machine with busy neighbours: hardly any
of the time is spent computing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.simulate_check import Case, Real, asked
from benchmarks.simulate_costs import Costs
from benchmarks.simulate_world import BLOCK, VOCABULARY, Load, Shape
from shared.bus.embedded import EmbeddedNats
from shared.engine.span import Span
from tests.fake_engine import FakeEngine
from tests.fleet_rig import MODEL
from tests.nats_fleet import NatsFleet
from trine.client import Client

BLOCKS, CONTEXT = 1024, 8192
SETTINGS = {"block_size": BLOCK, "ack_wait_s": 5.0, "beat_s": 0.3, "peer_timeout_s": 3.5}
MEMORY = 2 << 30
SETTLE_S = 2.0
LOADS = ("tokens_per_s", "tpot_ms")

CASES = (
    Case("1 decode, 4 chats", {"decode": 1}, Load(10, 64, 24, concurrency=4, spread=0.5), LOADS),
    Case("2 decode, 8 chats", {"decode": 2}, Load(20, 64, 24, concurrency=8, spread=0.5), LOADS),
    Case("1 prefill, 1 decode", {"prefill": 1, "decode": 1}, Load(6, 768, 12, concurrency=2, spread=0.5), LOADS),
    Case("2 prefill, 1 decode", {"prefill": 2, "decode": 1}, Load(8, 768, 12, concurrency=3, spread=0.5), LOADS),
    Case("2 prefill, 2 decode", {"prefill": 2, "decode": 2}, Load(12, 512, 12, concurrency=4, spread=0.5), LOADS),
    Case(
        "the same prefix again",
        {"prefill": 1, "decode": 1},
        Load(10, 768, 12, concurrency=2, shared=0.9, spread=0.5),
        LOADS,
    ),
)


class PacedEngine(FakeEngine):
    """A step takes what `costs` say, and at least what the fake one needs."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(blocks=BLOCKS, block_size=BLOCK, context=CONTEXT)
        self.info = replace(self.info, vocab_size=VOCABULARY)
        self._costs = costs

    def step(self, spans: Sequence[Span]) -> list[list[int]]:
        started = time.perf_counter()
        found = super().step(spans)
        time.sleep(max(self._costs.step_s(spans) - (time.perf_counter() - started), 0.0))
        return found


def paced(costs: Costs) -> Costs:
    """Of such workers: each has all the cores it wants, a block is a few bytes, and texts cost nothing."""
    return replace(costs, cores=1 << 20, contention=0.0, block_bytes=4 * BLOCK, host_s=0.003, intake_s=0.01)


def shape(case: Case) -> Shape:
    return replace(case.shape, machine_bytes=0, pool_blocks=BLOCKS, mixed_tokens=None)


async def real(case: Case, load: Load, rounds: int, costs: Costs) -> list[Real]:
    """Each round asks prompts that no other has."""
    server = EmbeddedNats(0, max_memory_store=MEMORY)
    await asyncio.to_thread(server.start)
    try:
        async with NatsFleet(server.url) as fleet:
            for number in range(case.counts.get("prefill", 0)):
                await fleet.prefill(f"prefill-{number}", PacedEngine(costs), chunk_tokens=256, **SETTINGS)
            for number in range(case.counts.get("decode", 0)):
                await fleet.decode(
                    f"decode-{number}",
                    PacedEngine(costs),
                    local_prefill_tokens=128,
                    prefill_patience_s=5.0,
                    draft_depth=0,
                    **SETTINGS,
                )
            await asyncio.sleep(SETTLE_S)
            async with Client(server.url, MODEL) as client:
                return [await asked(client, replace(load, seed=load.seed + 10 * turn)) for turn in range(rounds)]
    finally:
        server.stop()
