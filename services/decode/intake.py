"""Takes requests from the queue, one pull loop per priority; a bad one is refused with a typed event."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import structlog

from services.decode.config import DecodeSettings
from services.decode.events import EventWriter, History, read_history
from services.decode.refusal import Refusals
from services.decode.request import Request, make_sequence, parse, tokenise
from services.decode.turns import Turns
from shared.bus.base import Bus, Job
from shared.bus.settle import settle
from shared.cancels import Cancels
from shared.codec import format_of
from shared.engine.base import ModelInfo
from shared.errors import BusError, DeadlineExceeded, RequestError, TrineError, Unavailable
from shared.messages import Generate
from shared.sampling.stopping import Completion
from shared.subjects import PRIORITIES, Subjects
from shared.telemetry import Counters
from shared.tokenizer import Tokenizer

PULL_S = 0.5  # short: a worker that has filled up meanwhile must not take what another could run
MAX_HANDBACKS = 3  # deliveries after which a full worker keeps a request after all, rather than use up its attempts
MAX_DELIVERIES = 10

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
        root: bytes,
        counters: Counters,
        has_room: Callable[[], bool],
        serve: Callable[[Request], None],
        adopt: Callable[[Job], bool],
        refusals: Refusals,
        cancels: Cancels,
        ensure_streams: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._subjects = subjects
        self._tokenizer = tokenizer
        self._info = info
        self._root = root
        self._counters = counters
        self._has_room = has_room
        self._serve = serve
        self._adopt = adopt
        self._refusals = refusals
        self._cancels = cancels
        self._ensure_streams = ensure_streams
        self._room = anyio.Event()
        self._turns = Turns(PRIORITIES)
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

    async def _accept(self, job: Job, priority: str) -> None:
        """Whatever the message is, this worker goes on: it is served, answered, or handed back."""
        if self.closed:
            await settle(job.nak())
            return
        if self._adopt(job):
            return
        if not self._has_room() and job.delivered <= MAX_HANDBACKS:  # filled up while this pull was out
            self._turns.handed_back(priority)
            await settle(job.nak())
            return
        request_id = None
        try:
            generate = await anyio.to_thread.run_sync(parse, job.data, self._subjects.model)
            request_id = generate.id
            request = await self._prepare(generate, job, priority)
        except (RequestError, Unavailable) as error:
            await self._refusals.refuse(job, error, request_id)
        except BusError as error:
            log.warning("request handed back", seq=job.seq, error=str(error))
            if error.code == "stream_missing":
                await self._ensure_streams()
            await settle(job.nak(1.0))
        except Exception:
            log.exception("request could not be taken in", seq=job.seq)
            await self._refusals.refuse(job, TrineError("internal error while reading the request"), request_id)
        else:
            if request is not None:
                self._serve(request)

    async def _prepare(self, generate: Generate, job: Job, priority: str) -> Request | None:
        """The request, ready to be scheduled. None if it has ended already."""
        deadline = (generate.deadline_ms or self._settings.deadline_s * 1000) / 1000 - job.age
        if deadline <= 0:
            raise DeadlineExceeded(f"queued for {job.age:.1f} s, beyond its deadline")
        if job.delivered > MAX_DELIVERIES:
            raise Unavailable(f"given up after {MAX_DELIVERIES} attempts")
        prompt = await anyio.to_thread.run_sync(tokenise, generate, self._tokenizer, self._info)
        history = await self._history(generate, job)
        if history.ended:
            await settle(job.ack())
        elif history.foreign:
            await self._refusals.duplicate(job, generate.id)
        elif self._cancels.covers(generate.id, time.monotonic() - job.age):
            await self._refusals.cancelled(job, generate, len(history.tokens))
        else:
            return self._request(generate, job, priority, prompt, history, deadline)
        return None

    async def _history(self, generate: Generate, job: Job) -> History:
        """A first delivery has none, in all likelihood: its first append finds out. Later ones read what was sent."""
        if job.delivered == 1:
            return History()
        self._counters["redeliveries"] += 1
        return await read_history(self._bus, self._subjects, generate.id, job.seq)

    def _request(
        self, generate: Generate, job: Job, priority: str, prompt: list[int], history: History, deadline: float
    ) -> Request:
        sequence = make_sequence(generate, job, prompt, history, self._info, self._root, priority)
        completion = Completion(self._tokenizer.detokenizer(), self._info.eos_ids, generate.stops, sequence.max_tokens)
        events = EventWriter(
            self._bus,
            self._subjects,
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
        return Request(generate, job, sequence, completion, events, deadline=ends, queued_s=job.age)
