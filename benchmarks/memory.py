"""How much KV memory is wasted: the places in blocks in use that hold no token, under a mixed load.

`python -m benchmarks.memory [--json]`. 64 requests with prompts of 20 to 2000 tokens and answers of 16 to 512, a part
of them with a system prompt in common, arrive while others run. They go through the decode scheduler itself, with a
model that only makes up tokens and drafts; everything is seeded. Once with a pool that never fills up, once with one
that is too small for the load.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.bars import judged
from services.decode.scheduler import DecodeScheduler
from services.decode.sequence import Sequence as Generation
from services.decode.sequence import Work
from shared.cache.blocks import BlockAllocator
from shared.cache.naming import Lineage
from shared.engine.base import Sampled
from shared.lifecycle import Phase
from shared.messages import Sampling

BAR = 0.04
BLOCK_SIZE = 16
CONTEXT = 8192
VOCAB = 49152
REQUESTS = 64
MAX_TOKENS = 512
RUNNING, STEP_TOKENS, DRAFTS = 32, 256, 4  # a decode worker's defaults
SYSTEM_PROMPT, WITH_SYSTEM_PROMPT = 400, 0.4
STEPS_BETWEEN_ARRIVALS = 4
ACCEPTED = 0.6
POOLS = {"roomy": 4096, "tight": 400}
LOADED = 8  # sequences that run when a share counts as one under load
LINEAGE = Lineage(b"", "default")


@dataclass(frozen=True, slots=True)
class Request:
    tokens: list[int]
    answer: int
    """Tokens until it stops, at most MAX_TOKENS; the scheduler cannot know."""
    step: int
    """When it arrives."""


def load(seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    system = [rng.randrange(VOCAB) for _ in range(SYSTEM_PROMPT)]
    requests, step = [], 0.0
    for _ in range(REQUESTS):
        length = round(20 * 100 ** rng.random())  # 20 to 2000, as many short ones as long ones
        shared = system if rng.random() < WITH_SYSTEM_PROMPT and length > SYSTEM_PROMPT else []
        tokens = [*shared, *(rng.randrange(VOCAB) for _ in range(length - len(shared)))]
        requests.append(Request(tokens, rng.randint(16, MAX_TOKENS), int(step)))
        step += rng.expovariate(1 / STEPS_BETWEEN_ARRIVALS)
    return requests


@dataclass(slots=True)
class Share:
    """Places without a token, as a share of all places, averaged over steps."""

    wasted: int = 0
    places: int = 0
    peak: float = 0.0

    def add(self, tokens: int, places: int, counts_for_peak: bool) -> None:
        self.wasted += places - tokens
        self.places += places
        if places and counts_for_peak:
            self.peak = max(self.peak, 1 - tokens / places)

    @property
    def mean(self) -> float:
        return self.wasted / self.places if self.places else 0.0


@dataclass(slots=True)
class Record:
    """What is seen between steps."""

    generating: Share = field(default_factory=Share)
    all: Share = field(default_factory=Share)
    in_step: Share = field(default_factory=Share)
    at_admission: Share = field(default_factory=Share)
    contiguous_at_most: Share = field(default_factory=Share)
    contiguous_at_context: Share = field(default_factory=Share)
    blocks: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    def look(self, holders: Sequence[Generation], allocator: BlockAllocator) -> None:
        loaded = len(holders) >= LOADED
        generating = tokens_in(s for s in holders if s.generating)
        everything = tokens_in(holders)
        in_use = allocator.in_use
        self.generating.add(sum(generating.values()), len(generating) * BLOCK_SIZE, loaded)
        self.all.add(sum(everything.values()), in_use * BLOCK_SIZE, loaded)
        promised = sum(max(allocator.blocks_for(len(s.tokens)) - len(s.table), 0) for s in holders)
        self.at_admission.add(sum(everything.values()), (in_use + promised) * BLOCK_SIZE, loaded)
        computed = sum(s.computed for s in holders)
        self.contiguous_at_most.add(computed, sum(s.prompt_len + s.max_tokens for s in holders), loaded)
        self.contiguous_at_context.add(computed, len(holders) * CONTEXT, loaded)
        self.blocks.append(in_use)
        self.saved.append(sum(len(s.table) for s in holders) - in_use)


def tokens_in(holders: Iterator[Generation] | Sequence[Generation]) -> dict[int, int]:
    """Block → tokens it holds, each block once however many share it."""
    held: dict[int, int] = {}
    for sequence in holders:
        for index, block in enumerate(sequence.table):
            tokens = min(max(sequence.computed - index * BLOCK_SIZE, 0), BLOCK_SIZE)
            held[block] = max(held.get(block, 0), tokens)
    return held


def guess(work: Work, rng: random.Random) -> Sampled:
    """The model: takes a draft as often as a real one does."""
    drafts = work.span.token_ids[len(work.span.token_ids) - work.drafts :]
    taken = [draft if rng.random() < ACCEPTED else rng.randrange(VOCAB) for draft in drafts]
    return Sampled([*taken, rng.randrange(VOCAB)] if work.span.rows else [])


def run(requests: Sequence[Request], blocks: int, seed: int = 0) -> dict[str, float]:
    rng = random.Random(seed)
    allocator = BlockAllocator(blocks, BLOCK_SIZE)
    scheduler = DecodeScheduler(
        allocator, block_size=BLOCK_SIZE, context_length=CONTEXT, max_running=RUNNING, step_tokens=STEP_TOKENS
    )
    record, arriving, answers = Record(), deque(enumerate(requests)), dict[str, int]()
    step = 0
    while arriving or scheduler.live():
        while arriving and arriving[0][1].step <= step:
            number, request = arriving.popleft()
            answers[str(number)] = request.answer
            scheduler.submit(
                Generation(str(number), list(request.tokens), len(request.tokens), LINEAGE, MAX_TOKENS, Sampling(), 0)
            )
        for sequence in scheduler.admit():
            scheduler.loaded(sequence)  # nothing is in the shared cache
        for sequence in scheduler.live():
            sequence.drafts = tuple(rng.randrange(VOCAB) for _ in range(DRAFTS)) if sequence.generating else ()
        works = scheduler.plan()
        record.in_step.add(
            sum(tokens_in(scheduler.live()).values()), allocator.in_use * BLOCK_SIZE, scheduler.running >= LOADED
        )
        for outcome in scheduler.complete(works, [guess(w, rng) for w in works]):
            if outcome.sequence.generated >= answers[outcome.sequence.id]:
                scheduler.end(outcome.sequence)
        record.look([s for s in scheduler.live() if s.phase is Phase.READY], allocator)
        step += 1
    return summary(record, scheduler.preemptions, step)


def summary(record: Record, preemptions: int, steps: int) -> dict[str, float]:
    return {
        "waste_generating": record.generating.mean,
        "waste_generating_peak": record.generating.peak,
        "waste": record.all.mean,
        "waste_peak": record.all.peak,
        "waste_while_a_step_runs": record.in_step.mean,
        "waste_if_prompts_had_their_blocks_from_admission": record.at_admission.mean,
        "waste_contiguous_prompt_and_max_tokens": record.contiguous_at_most.mean,
        "waste_contiguous_context": record.contiguous_at_context.mean,
        "blocks_in_use_mean": sum(record.blocks) / len(record.blocks),
        "blocks_in_use_peak": max(record.blocks),
        "blocks_saved_by_sharing_mean": sum(record.saved) / len(record.saved),
        "blocks_saved_by_sharing_peak": max(record.saved),
        "preemptions": preemptions,
        "steps": steps,
    }


def measure() -> dict[str, dict[str, float]]:
    requests = load()
    return {name: {"blocks": blocks, **run(requests, blocks)} for name, blocks in POOLS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    result = measure()
    worst = max(values["waste"] for values in result.values())
    if arguments.json:
        print(json.dumps({"waste": worst, **result, "bars": judged({"waste": worst}, {"waste": ("<=", BAR)})}))
        return
    print(f"{'pool':52}" + "".join(f"{name:>10}" for name in result))
    for name in next(iter(result.values())):
        print(f"{name:52}" + "".join(f"{_shown(name, values[name]):>10}" for values in result.values()))
    print(f"\nplaces in blocks in use that hold no token: {worst:.2%} (bar: {BAR:.0%})")


def _shown(name: str, value: float) -> str:
    return f"{value:.2%}" if name.startswith("waste") else f"{value:.0f}"


if __name__ == "__main__":
    main()
