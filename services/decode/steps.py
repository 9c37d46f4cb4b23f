"""Runs the scheduler's plans on the engine, and finds the request to blame when a step fails."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import structlog

from services.decode.guided import Stepped, sample_within
from services.decode.scheduler import DecodeScheduler
from services.decode.sequence import Outcome, Sequence, Work
from shared.engine.base import BadSpans, Sampled, StepEngine
from shared.errors import RequestError, TrineError
from shared.lifecycle import Phase
from shared.telemetry import Counters, Spent

ALONE_IN_A_ROW = 3
"""Failures of steps of one sequence, nothing succeeding in between, after which it is not the sequences' fault."""

log = structlog.get_logger()


class Steps:
    """`in_engine` runs a blocking call in the engine thread; `fail` ends a sequence's request with an error.

    `timed` is told of each step in which nobody's prompt is computed: its sequences, positions and seconds.
    """

    def __init__(
        self,
        engine: StepEngine,
        scheduler: DecodeScheduler,
        in_engine: Callable[..., Awaitable[Any]],
        fail: Callable[[Sequence, TrineError], None],
        counters: Counters,
        timed: Callable[[int, int, float], None],
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._in_engine = in_engine
        self._fail = fail
        self._counters = counters
        self._timed = timed
        self._spent = Spent()
        self._failed_alone = 0

    async def run(self, works: list[Work]) -> list[Outcome]:
        """One step. A failed one is repeated one sequence at a time, so that only the one to blame is failed.

        Raises the step's error when nothing succeeds and nobody is to blame: the engine is broken. Ending with it lets
        others serve the requests that are held here.
        """
        started = time.perf_counter()
        try:
            done = await self._step(works)
        except Exception as error:
            self._counters["failed_steps"] += 1
            log.exception("step failed", exc_info=error, requests=[w.sequence.id for w in works])
            return await self._isolate(works, error)
        self._failed_alone = 0
        works = done.works
        prompts = sum(len(w.span.token_ids) for w in works if len(w.span.token_ids) != 1 + w.drafts)
        self._counters["prefill_tokens"] += prompts
        if works and not prompts:
            self._timed(len(works), len(works) + sum(w.drafts for w in works), time.perf_counter() - started)
        return self._complete(works, done.sampled, done.refused)

    async def _step(self, works: list[Work]) -> Stepped:
        try:
            done: Stepped = await self._in_engine(self._spent.run, sample_within, works, self._sample)
            return done
        finally:
            for name, count in self._spent.counts.items():
                self._counters[name] = count

    def _sample(self, works: list[Work]) -> list[Sampled]:
        return self._engine.sample([w.span for w in works])

    def _complete(
        self, works: list[Work], sampled: list[Sampled], refused: list[tuple[Work, TrineError]]
    ) -> list[Outcome]:
        outcomes = self._scheduler.complete(works, sampled)
        self._scheduler.abandon([work for work, _ in refused])
        for work, error in refused:
            if work.sequence.phase is Phase.READY:
                self._fail(work.sequence, error)
        return outcomes

    async def _isolate(self, works: list[Work], first: Exception) -> list[Outcome]:
        good: list[Work] = []
        errors = [first]
        sampled: list[Sampled] = []
        refused: list[tuple[Work, TrineError]] = []
        # Without their drafts: a token that only a drafter chose may be what the model cannot bear.
        for work in [_undrafted(w) for w in works if len(works) > 1 or w.drafts]:
            try:
                done = await self._step([work])
                good, sampled, refused = good + done.works, sampled + done.sampled, refused + done.refused
            except Exception as error:
                errors.append(error)
                log.error("the request that broke the step", request=work.sequence.id, error=repr(error))
        if not good and not refused and not any(isinstance(error, BadSpans | RequestError) for error in errors):
            self._failed_alone += 1
            if len(works) > 1 or self._failed_alone == ALONE_IN_A_ROW:
                raise first
        outcomes = self._complete(good, sampled, refused)
        settled = {w.sequence for w in good} | {work.sequence for work, _ in refused}
        bad = [w for w in works if w.sequence not in settled]
        self._scheduler.abandon(bad)
        for work in bad:
            if work.sequence.phase is Phase.READY:
                self._fail(work.sequence, TrineError("the model could not run this request"))
        return outcomes


def _undrafted(work: Work) -> Work:
    if not work.drafts:
        return work
    span = replace(work.span, token_ids=work.span.token_ids[: -work.drafts], rows=1, guesses=0)
    return Work(work.sequence, span)
