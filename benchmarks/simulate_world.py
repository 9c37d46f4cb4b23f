"""What a simulated fleet is made of, what is asked of it, and what came of that. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.simulate_cache import Hits
from benchmarks.simulate_clock import BusRates
from services.decode.scheduler import MIXED_ON_CPU
from shared.cache.naming import Lineage
from shared.messages import Identity
from trine.bench_stats import percentile

BLOCK = 16
VOCABULARY = 50_000
LINEAGE = Lineage.of(Identity(fingerprint="simulated", codec="none", block_size=BLOCK, block_bytes=1), "default")
BUSY = 0.85
"""What is at work for so much of the time is the limit."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`machines` each have so many workers of each role."""

    prefill: int = 1
    decode: int = 1
    drafter: int = 0
    machines: int = 1
    pool_blocks: int = 1024
    """Of each worker."""
    stream_bytes: int = 1 << 30
    machine_bytes: int = 1 << 30
    max_running: int = 32
    step_tokens: int = 256
    mixed_tokens: int | None = MIXED_ON_CPU
    chunk_tokens: int = 256
    max_jobs: int = 8
    local_prefill_tokens: int = 128
    patience_s: float = 5.0
    draft_depth: int = 8
    draft_wait_s: float = 0.05
    affinity: bool = True
    bus: BusRates = field(default_factory=BusRates)


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` in all: `concurrency` at a time, or `rate` a second at random moments.

    The first `shared` of a prompt's tokens are those of one of `groups` prefixes; the rest is its own. Answers have
    `output` tokens, give or take up to the share `spread` of them: of one length, they would all end at once.
    `acceptances`: of each request's drafts, where they are known to differ.
    """

    requests: int
    prompt: int
    output: int
    concurrency: int = 0
    rate: float = 0.0
    shared: float = 0.0
    groups: int = 1
    seed: int = 0
    spread: float = 0.0
    acceptances: tuple[float, ...] = ()

    def outputs(self) -> list[int]:
        draw = Random(self.seed + 2)
        return [
            max(round(self.output * (1 + draw.uniform(-self.spread, self.spread))), 1) for _ in range(self.requests)
        ]

    def prompts(self) -> list[tuple[int, ...]]:
        """The same for the same load, wherever they are asked."""
        draw = Random(self.seed)
        common = int(self.prompt * self.shared)
        prefixes = [self._tokens(draw, common) for _ in range(self.groups)]
        return [draw.choice(prefixes) + self._tokens(draw, self.prompt - common) for _ in range(self.requests)]

    def arrivals(self) -> list[float]:
        """Seconds from the start, for a load with a rate."""
        draw, at, found = Random(self.seed + 1), 0.0, []
        for _ in range(self.requests):
            found.append(at)
            at += draw.expovariate(self.rate)
        return found

    @staticmethod
    def _tokens(draw: Random, count: int) -> tuple[int, ...]:
        return tuple(draw.choices(range(1000, 40_000), k=count))


@dataclass(slots=True, eq=False)
class Request:
    id: str
    prompt: tuple[int, ...]
    output: int
    asked: float
    acceptance: float
    """Chance that a draft is right if those before it are."""
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    def target(self, position: int) -> int:
        """The token that the model takes there."""
        return (hash(self.id) * 31 + position * 7919) % VOCABULARY


@dataclass(frozen=True, slots=True)
class Result:
    seconds: float
    requests: int
    tokens: int
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    busy: dict[str, float]
    """Share of the time, by role, and of `NATS`."""
    hits: Hits
    nats_bytes: float
    nats_messages: int
    drafted: int
    accepted: int
    steps: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def limit(self) -> str:
        """What would have to be more or faster first."""
        name = max(self.busy, key=lambda n: self.busy[n])
        return name if self.busy[name] >= BUSY else "the load"

    def as_dict(self) -> dict[str, Any]:
        found = {name: getattr(self.hits, name) for name in ("pool", "machine", "nats", "prefill", "computed")}
        blocks = max(sum(found.values()), 1)
        return {
            "seconds": self.seconds,
            "requests_per_s": self.requests / max(self.seconds, 1e-9),
            "tokens_per_s": self.tokens_per_s,
            "ttft_ms": _ms(self.ttft_s),
            "tpot_ms": _ms(self.tpot_s),
            "busy": self.busy,
            "limit": self.limit,
            "prompt_blocks": {name: count / blocks for name, count in found.items()},
            "nats_mb_per_s": self.nats_bytes / max(self.seconds, 1e-9) / 1e6,
            "nats_messages_per_s": self.nats_messages / max(self.seconds, 1e-9),
            "accepted": self.accepted / max(self.drafted, 1),
            "drafted": self.drafted,
        }


def _ms(seconds: Sequence[float]) -> dict[str, float]:
    """0 of none."""
    return {f"p{percent}": percentile(seconds or (0.0,), percent) * 1e3 for percent in (50, 99)}
