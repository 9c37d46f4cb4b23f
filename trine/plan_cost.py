"""How long a worker's steps take, and how many sequences, tokens and jobs it manages. Pure arithmetic.

A step reads all weights and the KV of its sequences, and multiplies each position with the weights; the slower of the
two counts (the roofline model, Williams et al. 2009).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from shared.messages import MAX_BATCH
from trine.plan_hardware import Hardware
from trine.plan_model import ModelShape

MAX_DEPTH = 8
"""As `TRINE_DRAFT_DEPTH`, unless set."""
ASK_S = 0.0005
"""A request to a drafter and its answer over NATS, without what the drafter computes: p50 0.27 to 0.43 ms, p99 1 ms."""
LEAST_CHUNK, MOST_CHUNK = 256, 8192
SPARE = 0.9
"""Of the memory that weights leave, what KV may take: the rest is for activations."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """`acceptance`: chance that a draft is right if those before it are. `cost`: a draft's, in steps of the target."""

    acceptance: float = 0.0
    cost: float = 0.05

    def tokens(self, depth: int) -> float:
        """Of a step that checks so many drafts: 1 + a + a² + … (Leviathan et al. 2023)."""
        return 1.0 + sum(self.acceptance**drafts for drafts in range(1, depth + 1))


@dataclass(frozen=True, slots=True)
class Pace:
    """A decode worker at its best: `sequences` at once, `depth` drafts for each, `step_s` with the wait for drafts."""

    sequences: int
    depth: int
    step_s: float
    tokens: float
    """Of one sequence in one step."""
    share: float
    """Of its time, what it has for such steps; in the rest it computes prompts."""

    @property
    def positions(self) -> int:
        """Of one step."""
        return self.sequences * (1 + self.depth)

    @property
    def rate(self) -> float:
        """Tokens per second of all sequences."""
        return self.sequences * self.tokens / self.step_s * self.share

    @property
    def tpot_s(self) -> float:
        """Mean time between two tokens of one sequence."""
        return self.step_s / self.tokens / self.share


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one model on one kind of machine with one KV codec."""

    model: ModelShape
    hardware: Hardware
    codec: str

    @property
    def kv_bytes(self) -> float:
        return self.model.kv_bytes(self.codec)

    def step_s(self, sequences: int, positions: int, context: float) -> float:
        """Of a decode step with so many sequences, `positions` of each, behind `context` tokens of each."""
        plain = sequences * context * self.model.kv_bytes()
        kv = self.hardware.kv_weight(self.codec, sequences * context * self.kv_bytes, plain)
        reading = self.hardware.read_s(self.model.read_bytes(sequences * positions) + kv)
        if sequences * positions > 1:
            reading *= 1.0 + self.hardware.bend
        computing = self.hardware.compute_s(sequences * positions * self.model.flops(context))
        return self._both(reading, computing)

    def chunk_tokens(self) -> int:
        """Tokens of a prefill step, a power of two: as many as make its arithmetic twice as long as reading weights."""
        size = LEAST_CHUNK
        while size < MOST_CHUNK:
            reading = self.hardware.read_s(self.model.read_bytes(size))
            if self.hardware.compute_s(size * self.model.flops(0)) >= 2 * reading:
                break
            size *= 2
        return size

    def prefill_rate(self, context: float) -> float:
        """Prompt tokens per second of one worker, behind `context` others each on average."""
        chunk = self.chunk_tokens()
        computing = self.hardware.compute_s(chunk * self.model.flops(context))
        return chunk / self._both(self.hardware.read_s(self.model.read_bytes(chunk)), computing)

    def _both(self, reading: float, computing: float) -> float:
        together = max(reading, computing) if self.hardware.overlaps else reading + computing
        return together + self.hardware.floor_s

    def room(self) -> float:
        """Bytes for KV; below zero: the weights do not fit."""
        return (self.hardware.memory - self.model.weight_bytes) * SPARE

    def fitting(self, tokens: float) -> int:
        """Sequences of so many tokens whose KV fits."""
        return int(min(max(self.room(), 0.0) // (tokens * self.kv_bytes), MAX_BATCH))

    def pace(self, context: float, most: int, tpot_s: float, drafting: Drafting, share: float = 1.0) -> Pace | None:
        """The fastest for all sequences together, of at most `most`, that keeps to `tpot_s`; None: none does.

        Every target that is met stays met when it is loosened, or the share of time grows, so that neither ever makes
        it slower.
        """
        best: Pace | None = None
        for depth in depths(drafting):
            # A step's time grows less than its sequences: the most that keep to the target are also the fastest.
            fitting = bisect_right(
                range(1, most + 1), tpot_s, key=lambda n: self.paced(n, depth, context, drafting, share).tpot_s
            )
            if not fitting:
                continue
            pace = self.paced(fitting, depth, context, drafting, share)
            if best is None or pace.rate > best.rate:
                best = pace
        return best

    def paced(self, sequences: int, depth: int, context: float, drafting: Drafting, share: float = 1.0) -> Pace:
        wait = ASK_S + self.drafts_s(sequences, depth, context, drafting) if depth else 0.0
        step_s = self.step_s(sequences, 1 + depth, context) + wait
        return Pace(sequences, depth, step_s, drafting.tokens(depth), share)

    def drafts_s(self, sequences: int, depth: int, context: float, drafting: Drafting) -> float:
        """Of a drafter's time, for so many drafts for each of so many sequences: it has a batch of its own."""
        return depth * drafting.cost * self.step_s(sequences, 1, context)


def depths(drafting: Drafting) -> range:
    """Of drafts, those worth comparing; nothing is known of drafts that are never accepted."""
    return range(MAX_DEPTH + 1) if drafting.acceptance > 0 else range(1)
