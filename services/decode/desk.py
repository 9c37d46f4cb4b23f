"""The requests that a decode worker is serving: from taking one in until its end is stored and it is acked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import anyio
import structlog

from services.decode.attempts import Attempts
from services.decode.events import Outcome
from services.decode.refusal import Refusals, failed
from services.decode.request import Request
from services.decode.scheduler import DecodeScheduler
from services.decode.trials import Trials
from shared.bus.base import Job
from shared.bus.settle import settle
from shared.errors import ContextLengthExceeded, DeadlineExceeded, TrineError
from shared.lifecycle import Phase
from shared.messages import Finished
from shared.telemetry import Counters

log = structlog.get_logger()


class Desk:
    """By `Request.key`. `spawn` runs a task; `left(key)` is called for each request that has gone."""

    def __init__(
        self,
        worker: str,
        scheduler: DecodeScheduler,
        refusals: Refusals,
        attempts: Attempts,
        counters: Counters,
        spawn: Callable[..., None],
        left: Callable[[str], None],
    ) -> None:
        self.requests: dict[str, Request] = {}
        self._worker = worker
        self._scheduler = scheduler
        self._refusals = refusals
        self._attempts = attempts
        self._trials = Trials()
        self._counters = counters
        self._spawn = spawn
        self._left = left
        self._changed = anyio.Event()

    # Coming

    def adopt(self, job: Job) -> bool:
        """A redelivery of what is served here: the earlier hold came too late, nothing is wrong."""
        for request in self.requests.values():
            if (request.job.seq, request.job.stamp) == (job.seq, job.stamp):
                request.job = job
                return True
        return False

    def open(self, request: Request) -> None:
        """Serve it. It may be ended when this returns."""
        if self.adopt(request.job):  # it came in twice, by the queue and from another worker
            return
        if request.key in self.requests:  # the same id twice at once: the first one has it
            self._spawn(self._refusals.duplicate, request.job, request.generate.id)
            return
        self.requests[request.key] = request
        self._spawn(self._write_events, request)
        if request.completion.finished is not None:
            self.finish(request, request.completion.finished)
            return
        self._trials.enter(request.key, request.suspect)
        started = self._trials.start()
        if request.key not in started:
            self._spawn(self._note_waiting, request)
        self._submit(started)

    @property
    def lines_up(self) -> bool:
        """Requests wait here because one is tried apart."""
        return self._trials.waiting

    def proven(self, request: Request) -> None:
        """It has its first token here: others may join it."""
        self._leave_trial(request.key)

    def _leave_trial(self, key: str) -> None:
        self._trials.leave(key)
        started = self._trials.start()
        for name in started:
            self._spawn(self._note_begun, self.requests[name])
        self._submit(started)

    def _submit(self, keys: Iterable[str]) -> None:
        for key in keys:
            request = self.requests[key]
            try:
                self._scheduler.submit(request.sequence)
            except ContextLengthExceeded as error:
                self.fail(request, error)

    async def _note_waiting(self, request: Request) -> None:
        await self._attempts.note(request.job, busy=False)

    async def _note_begun(self, request: Request) -> None:
        await self._attempts.note(request.job, busy=True)

    # Ending: the first end counts, and what was handed back is another worker's to end

    def finish(self, request: Request, reason: str) -> None:
        if request.sequence.phase is Phase.ENDED:
            return
        self._counters[f"finished_{reason}"] += 1
        event = Finished(
            id=request.generate.id,
            attempt=request.job.delivered,
            reason=reason,  # type: ignore[arg-type]
            seed=request.sequence.seed,
            usage=request.usage(),
            timings=request.timings(),
            served_by=request.served_by(self._worker),
        )
        request.events.end(event, tail=request.completion.flush())  # of one that nothing in its text has ended
        request.trace.ended(event)
        self._end(request)

    def fail(self, request: Request, error: TrineError) -> None:
        if request.sequence.phase is Phase.ENDED:
            return
        self._counters[f"failed_{error.code}"] += 1
        log.warning("request failed", request=request.key, code=error.code, error=error.message)
        event = failed(request.generate.id, request.job.delivered, error)
        request.events.end(event)
        request.trace.ended(event)
        self._end(request)

    def _end(self, request: Request) -> None:
        self._scheduler.end(request.sequence)
        self._leave_trial(request.key)

    def cancel(self, key: str) -> None:
        if (request := self.requests.get(key)) is not None:
            self._counters["cancelled"] += 1
            self.finish(request, "cancelled")

    def expire(self, now: float) -> None:
        """End those whose deadline has passed; `now` in monotonic seconds."""
        for request in list(self.requests.values()):
            if now > request.deadline and request.sequence.phase is not Phase.ENDED:
                self.fail(request, DeadlineExceeded("the request's deadline has passed"))

    # Leaving

    async def _write_events(self, request: Request) -> None:
        """The request's events, then its ack: it is done when its end is stored, not before."""
        try:
            outcome = await request.events.run()
        except Exception:
            log.exception("events cannot be written", request=request.key)
            outcome = Outcome.GIVEN_UP
        self._counters[f"events_{outcome.name.lower()}"] += 1
        if outcome is Outcome.ENDED:
            await settle(request.job.ack())
        elif outcome is Outcome.DUPLICATE:
            await self._refusals.duplicate(request.job, request.generate.id)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.trace.close("unfinished")  # if it has not ended here
        self._scheduler.end(request.sequence)
        if self.requests.get(request.key) is request:
            del self.requests[request.key]
            self._changed.set()
            self._changed = anyio.Event()
            self._leave_trial(request.key)
        self._left(request.key)

    async def empty(self) -> None:
        """Returns when nothing is served any more."""
        while self.requests:
            await self._changed.wait()

    async def hand_back(self) -> None:
        """What is not done goes back to the queue and is continued elsewhere."""
        self._trials = Trials()  # nobody's turn comes any more
        for request in list(self.requests.values()):
            self._forget(request)
            await self._attempts.note(request.job, busy=False)
            await settle(request.job.nak())

    def held(self) -> Iterator[Job]:
        return (request.job for request in self.requests.values())
