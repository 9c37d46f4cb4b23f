"""Requests through a decode worker's pure parts and a real engine, without bus or clock. A function drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from services.decode.events import History
from services.decode.guided import sample_within
from services.decode.request import banned_tokens, make_sequence
from services.decode.scheduler import DecodeScheduler
from services.decode.sequence import Outcome
from services.decode.sequence import Sequence as Generation
from shared.bus.base import Job
from shared.cache.blocks import BlockAllocator
from shared.cache.naming import Lineage
from shared.engine.base import StepEngine
from shared.errors import TrineError
from shared.messages import Generate, Guided
from shared.sampling.fields import Logprob
from shared.sampling.guide import Guide
from shared.sampling.stopping import Completion, Detokenizer
from tests.fake_engine import FakeTokenizer

Drafter = Callable[[Generation], Sequence[int]]
MakeGuide = Callable[[Guided, Collection[int]], Guide]


@dataclass(frozen=True)
class Queued:
    """What a sequence is told of its place in the queue: it makes the seed of those that have none."""

    seq: int
    stamp: int
    data: bytes = b""


@dataclass
class Answer:
    sequence: Generation
    completion: Completion
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    error: TrineError | None = None

    @property
    def finished(self) -> str | None:
        return "stop" if self.sequence.complete else self.completion.finished

    @property
    def said(self) -> tuple[list[int], str, str | None]:
        return self.tokens, self.completion.text, self.finished

    def take(self, outcome: Outcome) -> None:
        """As the service delivers it."""
        self.drafted += outcome.drafted
        self.accepted += outcome.accepted
        for position, token in enumerate(outcome.tokens):
            self.tokens.append(token)
            self.logprobs += outcome.logprobs[position : position + 1] if outcome.logprobs else ()
            if self.completion.push(token).finished is not None:
                return


class OneWorker:
    def __init__(self, engine: StepEngine, guide: MakeGuide | None = None, tokenizer: Any = None) -> None:
        """`guide` makes the guides of requests that want a form."""
        self.engine = engine
        self._tokenizer = tokenizer or FakeTokenizer()
        self._guide = guide
        self.stamp = 0
        """Of the queue's messages: when it changes, so do seeds that nobody chose."""

    def run(
        self,
        requests: Sequence[dict[str, Any]],
        drafter: Drafter | None = None,
        eos: Collection[int] | None = None,
    ) -> list[Answer]:
        """All requests at once. `eos`: EOS ids in place of the model's."""
        info = self.engine.info if eos is None else replace(self.engine.info, eos_ids=frozenset(eos))
        scheduler = DecodeScheduler(
            BlockAllocator(info.kv_blocks, info.block_size),
            block_size=info.block_size,
            context_length=info.context_length,
            max_running=16,
            step_tokens=256,
        )
        answers = {}
        for number, fields in enumerate(requests):
            generate = Generate(id=str(number), **fields)
            job = cast("Job", Queued(number, self.stamp))
            lineage = Lineage(b"", "default")
            sequence = make_sequence(
                generate.id, generate, job, generate.token_ids or [], History(), info, lineage, "normal"
            )
            completion = Completion(
                cast("Detokenizer", self._tokenizer.detokenizer()),
                info.eos_ids,
                generate.stops,
                sequence.max_tokens,
                sequence.sampling.min_tokens,
            )
            if generate.guided is not None and self._guide is not None:
                sequence.guide = self._guide(generate.guided, banned_tokens(sequence.sampling))
            answers[generate.id] = Answer(sequence, completion)
            scheduler.submit(sequence)
        while scheduler.live():
            for sequence in scheduler.admit():
                scheduler.loaded(sequence)
            for sequence in scheduler.live():
                if drafter is not None and sequence.generating:
                    sequence.drafts = tuple(drafter(sequence))
            done = sample_within(scheduler.plan(), lambda works: self.engine.sample([w.span for w in works]))
            for outcome in scheduler.complete(done.works, done.sampled):
                answer = answers[outcome.sequence.id]
                answer.take(outcome)
                if answer.finished is not None:
                    scheduler.end(outcome.sequence)
            scheduler.abandon([work for work, _ in done.refused])
            for work, error in done.refused:
                answers[work.sequence.id].error = error
                scheduler.end(work.sequence)
        scheduler.check_integrity()
        return list(answers.values())


def knowing(truths: Sequence[Sequence[int]], depth: int, wrong: float = 0.0) -> Drafter:
    """Drafts what each request was answered without drafts, and garbage beyond its end; a token is wrong at times."""
    rng = random.Random(0)

    def draft(sequence: Generation) -> list[int]:
        truth = truths[int(sequence.id)][sequence.generated :]
        told = [*truth, *(rng.randrange(3, 128) for _ in range(depth))][:depth]
        return [rng.randrange(3, 128) if rng.random() < wrong else token for token in told]

    return draft
