"""Takes requests from the queue, one pull loop per priority; a bad one is refused with a typed event."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import anyio
import structlog

from services.decode.attempts import TRIES, Attempts
from services.decode.config import DecodeSettings
from services.decode.events import EventWriter, History, read_history
from services.decode.publics import PublicPrefixes
from services.decode.refusal import Refusals
from services.decode.request import Request, make_sequence, parse, tokenise
from services.decode.sequence import Sequence
from services.decode.traces import NO_TRACE, Trace, Traces
from services.decode.turns import Turns
from shared.bus.base import Bus, Job
from shared.bus.settle import settle
from shared.cancels import Cancels
from shared.codec import format_of
from shared.engine.base import ModelInfo
from shared.errors import (
    BusDisconnected,
    BusError,
    DeadlineExceeded,
    InvalidField,
    Poison,
    RequestError,
    TrineError,
    Unavailable,
)
from shared.messages import Attempt, Generate
from shared.sampling.stopping import Completion
from shared.subjects import PRIORITIES, Subjects, tenant_of_request
from shared.telemetry import Counters
from shared.tenants import DEFAULT_TENANT, request_key
from shared.tokenizer import Tokenizer

PULL_S = 0.5  # short: a worker that has filled up meanwhile must not take what another could run
MAX_HANDBACKS = 3  # deliveries after which a full worker keeps a request after all, rather than use up its attempts
MAX_DELIVERIES = 10
MAX_TAKING = 4

log = structlog.get_logger()


class Intake:
    """From queue messages to `Request`s. `serve` is called with each good one; bad ones are answered here."""

    def __init__(
        self,
        settings: DecodeSettings,
        *,
        bus: Bus,
        subjects: Subjects,
        tokenizer: Tokenizer,
        info: ModelInfo,
        publics: PublicPrefixes,
        counters: Counters,
        has_room: Callable[[], bool],
        serve: Callable[[Request], None],
        cancel: Callable[[str], None],
        offer: Callable[[Job, Sequence, Trace], Awaitable[bool]],
        adopt: Callable[[Job], bool],
        refusals: Refusals,
        attempts: Attempts,
        traces: Traces,
        cancels: Cancels,
        ensure_streams: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._subjects = subjects
        self._tokenizer = tokenizer
        self._info = info
        self._publics = publics
        self._counters = counters
        self._has_room = has_room
        self._serve = serve
        self._cancel = cancel
        self._offer = offer
        self._adopt = adopt
        self._refusals = refusals
        self._attempts = attempts
        self._traces = traces
        self._cancels = cancels
        self._ensure_streams = ensure_streams
        self._room = anyio.Event()
        self._turns = Turns(PRIORITIES)
        self._taking = 0
        self._incoming: dict[tuple[int, int], Job] = {}
        self.closed = False

    def room_changed(self) -> None:
        """Call when a request has left or blocks came free."""
        self._room.set()
        self._room = anyio.Event()

    # Pulling

    def loop(self, priority: str, until_bus: Callable[..., Awaitable[Any]]) -> Callable[[], Awaitable[None]]:
        """The pull loop of one priority. It waits until the higher queues are empty, or have had their share."""

        async def run() -> None:
            while not self.closed:
                if not self._has_room():
                    await self._room.wait()
                    continue
                if not self._turns.may_pull(priority):
                    await anyio.sleep(0.002)
                    continue
                for job in await until_bus(lambda: self._pull(priority)):
                    await self._accept(job, priority)
            await anyio.sleep_forever()  # draining: the worker ends this task

        return run

    async def _pull(self, priority: str) -> list[Job]:
        stream, consumer = self._subjects.request_stream, self._subjects.request_consumer(priority)
        jobs: list[Job] = []
        try:
            jobs = await self._bus.pull(stream, consumer, 1, 0)
            if not jobs:
                self._turns.dry(priority)
                jobs = await self._bus.pull(stream, consumer, 1, PULL_S)
            return jobs
        finally:
            self._turns.over(priority, len(jobs))

    # Accepting

    def wants(self) -> bool:
        """Whether to take a request that another worker offers. Few come in at once: each takes room."""
        return not self.closed and self._has_room() and self._taking < MAX_TAKING

    def expect(self) -> None:
        """`take` is about to be called: what was wanted counts from now on."""
        self._taking += 1

    async def take(self, job: Job, priority: str) -> None:
        """Accept what another worker has pulled and handed over."""
        try:
            await self._accept(job, priority, handed=True)
        finally:
            self._taking -= 1

    async def _accept(self, job: Job, priority: str, handed: bool = False) -> None:
        """Whatever the message is, this worker goes on: it is served, answered, handed over or handed back."""
        if self.closed:
            await settle(job.nak())
            return
        if (job.seq, job.stamp) in self._incoming:  # redelivered while it is being prepared
            self._incoming[job.seq, job.stamp] = job
            return
        if self._adopt(job):
            return
        if not self._has_room() and job.delivered <= MAX_HANDBACKS:  # filled up while this pull was out
            if not handed:
                self._turns.handed_back(priority)
            await settle(job.nak())
            return
        self._incoming[job.seq, job.stamp] = job
        try:
            await self._take_in(job, priority, handed)
        finally:
            del self._incoming[job.seq, job.stamp]

    def held(self) -> Iterable[Job]:
        """Jobs that are being prepared."""
        return self._incoming.values()

    async def _take_in(self, job: Job, priority: str, handed: bool) -> None:
        request_id, trace = None, NO_TRACE
        try:
            generate = await anyio.to_thread.run_sync(parse, job.data, self._subjects.model)
            request_id = generate.id
            trace = self._traces.taken(job, generate, priority, handed=handed)
            request = await self._prepare(self._tenant(job), generate, job, priority, handed, trace)
        except (RequestError, Unavailable) as error:
            trace.close(error.code)
            await self._refusals.refuse(job, error, request_id)
        except BusError as error:
            trace.close(error.code)
            log.warning("request handed back", seq=job.seq, error=str(error))
            if error.code == "stream_missing":
                await self._ensure_streams()
            await self._attempts.note(job, busy=False)
            await settle(job.nak(1.0))
        except Exception:
            trace.close("internal")
            log.exception("request could not be taken in", seq=job.seq)
            await self._refusals.refuse(job, TrineError("internal error while reading the request"), request_id)
        else:
            if request is None:
                trace.close()
            else:
                request.trace = trace
                request.job = self._incoming[job.seq, job.stamp]  # perhaps of a later delivery
                await self._begin(request)

    async def _begin(self, request: Request) -> None:
        """Serve it, or end it if it was cancelled before it came or while it was being prepared.

        One that somebody has begun with ends as any that runs: it has its usage, and text that was held back is shown.
        The event stream may have lost what that one told, so what counts is that it was delivered before.
        """
        cancelled = self._cancels.covers(request.key, time.monotonic() - request.job.age)
        if cancelled and request.job.delivered == 1:
            request.trace.close("cancelled")
            await self._refusals.cancelled(request.job, request.generate)
            return
        self._serve(request)
        if cancelled:
            self._cancel(request.key)

    def _tenant(self, job: Job) -> str:
        """Raises InvalidField for a subject that proves nothing."""
        try:
            tenant = tenant_of_request(job.subject)
        except ValueError as error:
            raise InvalidField(str(error), field="tenant") from None
        if tenant != DEFAULT_TENANT and self._bus.authenticated is None:
            raise BusDisconnected("it is not known yet whether NATS lets in anybody")
        if tenant != DEFAULT_TENANT and not self._bus.authenticated:
            raise InvalidField("tenants need a NATS server that lets nobody in without credentials", field="tenant")
        return tenant

    async def _prepare(
        self, tenant: str, generate: Generate, job: Job, priority: str, handed: bool, trace: Trace
    ) -> Request | None:
        """The request, ready to be scheduled. None if it has ended already, or another worker has it now."""
        deadline = (generate.deadline_ms or self._settings.deadline_s * 1000) / 1000 - job.age
        if deadline <= 0:
            raise DeadlineExceeded(f"queued for {job.age:.1f} s, beyond its deadline")
        key, subject = request_key(tenant, generate.id), self._subjects.events(generate.id, tenant)
        history = await self._history(subject, job)
        if history.ended:
            await settle(job.ack())
            return None
        if history.foreign:
            await self._refusals.duplicate(job, generate.id)
            return None
        if job.delivered == 1 and self._cancels.covers(key, time.monotonic() - job.age):
            await self._refusals.cancelled(job, generate)
            return None
        died = await self._attempts.died(job, history.wrote)
        if len(died) >= TRIES or job.delivered > MAX_DELIVERIES:
            await self._give_up(job, tenant, generate.id, died)
            return None
        await self._attempts.begin(job)
        prompt = await anyio.to_thread.run_sync(tokenise, generate, self._tokenizer, self._info)
        lineage = self._publics.lineage(prompt, tenant, generate.cache_salt or "")
        sequence = make_sequence(key, generate, job, prompt, history, self._info, lineage, priority)
        if not handed and job.delivered == 1 and await self._offer(job, sequence, trace):
            return None
        request = self._request(sequence, subject, generate, job, history, deadline)
        request.suspect = bool(died)
        return request

    async def _give_up(self, job: Job, tenant: str, request_id: str, died: list[Attempt]) -> None:
        """Raises BusError, before anybody is told."""
        error: TrineError = Unavailable(f"given up after {MAX_DELIVERIES} attempts")
        if len(died) >= TRIES:
            error = Poison(
                f"given up: {len(died)} workers in a row died at work on this request, before it had another token; "
                f"they were {', '.join(note.worker for note in died)}"
            )
        await self._attempts.bury(job, request_id, tenant, error, died, len(died) or job.delivered - 1)
        await self._refusals.refuse(job, error, request_id)

    async def _history(self, subject: str, job: Job) -> History:
        """A first delivery has none, in all likelihood: its first append finds out. Later ones read what was sent."""
        if job.delivered == 1:
            return History()
        self._counters["redeliveries"] += 1
        return await read_history(self._bus, self._subjects.event_stream, subject, job.seq)

    def _request(
        self, sequence: Sequence, subject: str, generate: Generate, job: Job, history: History, deadline: float
    ) -> Request:
        completion = Completion(
            self._tokenizer.detokenizer(),
            self._info.eos_ids,
            generate.stops,
            sequence.max_tokens,
            sequence.sampling.min_tokens,
        )
        events = EventWriter(
            self._bus,
            self._subjects.event_stream,
            subject,
            generate.id,
            job.seq,
            attempt=job.delivered,
            format=format_of(job.data),
            history=history,
            ensure_streams=self._ensure_streams,
        )
        for token in history.tokens:  # the text state, and the end if the last attempt died before saying it
            if completion.finished is None:
                completion.push(token)
        ends = time.monotonic() + deadline
        return Request(sequence.id, generate, job, sequence, completion, events, deadline=ends, queued_s=job.age)
