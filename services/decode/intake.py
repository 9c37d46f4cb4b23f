"""Takes requests from the queue, one pull loop per priority; a bad one is refused with a typed event."""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgpack
import structlog

from services.decode.config import DecodeSettings
from services.decode.events import EventWriter, History, read_history
from services.decode.request import Request, make_sequence, parse, tokenise
from shared.bus.base import Bus, Job
from shared.codec import Format, encode, format_of
from shared.engine.base import ModelInfo
from shared.errors import BusError, DeadlineExceeded, RequestError, TrineError, Unavailable
from shared.messages import MAX_ID, Failed, Finished, Generate, ServedBy, Timings, Usage
from shared.sampling.stopping import Completion
from shared.streams import REQUEST_HEADER
from shared.subjects import PRIORITIES, Subjects
from shared.telemetry import Counters
from shared.tokenizer import Tokenizer

PULL_S = 5.0
MAX_DELIVERIES = 5
REMEMBERED_CANCELS = 4096

log = structlog.get_logger()


class Cancelled(Exception):
    """The request was cancelled before a worker took it."""


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
        worker: str,
        counters: Counters,
        has_room: Callable[[], bool],
        serve: Callable[[Request], None],
        adopt: Callable[[Job], bool],
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._subjects = subjects
        self._tokenizer = tokenizer
        self._info = info
        self._root = root
        self._worker = worker
        self._counters = counters
        self._has_room = has_room
        self._serve = serve
        self._adopt = adopt
        self._room = anyio.Event()
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._dry: set[str] = set()  # priorities whose queue is empty: a pull waits for the next message
        self.closed = False

    def room_changed(self) -> None:
        """Call when a request has left or blocks came free."""
        self._room.set()
        self._room = anyio.Event()

    def remember_cancel(self, request_id: str) -> None:
        self._cancelled[request_id] = None
        while len(self._cancelled) > REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)

    # Pulling

    def loop(self, priority: str, until_bus: Callable[..., Awaitable[Any]]) -> Callable[[], Awaitable[None]]:
        """The pull loop of one priority. It waits until the higher queues are empty."""

        async def run() -> None:
            higher = set(PRIORITIES[: PRIORITIES.index(priority)])
            while not self.closed:
                if not self._has_room():
                    await self._room.wait()
                    continue
                if not higher <= self._dry:
                    await anyio.sleep(0.002)
                    continue
                for job in await until_bus(lambda: self._pull(priority)):
                    await self._accept(job, priority)
            await anyio.sleep_forever()  # draining: the worker ends this task

        return run

    async def _pull(self, priority: str) -> list[Job]:
        stream, consumer = self._subjects.request_stream, self._subjects.request_consumer(priority)
        jobs = await self._bus.pull(stream, consumer, 1, 0)
        if jobs:
            return jobs
        self._dry.add(priority)
        try:
            return await self._bus.pull(stream, consumer, 1, PULL_S)
        finally:
            self._dry.discard(priority)

    # Accepting

    async def _accept(self, job: Job, priority: str) -> None:
        if self.closed:
            await _quietly(job.nak())
            return
        if self._adopt(job):
            return
        format = format_of(job.data)
        try:
            request = await self._prepare(job, priority, format)
        except Cancelled:
            return
        except (RequestError, Unavailable) as error:
            await self._refuse(job, format, error)
            return
        except BusError as error:
            log.warning("request handed back", seq=job.seq, error=str(error))
            await _quietly(job.nak(1.0))
            return
        except Exception:
            log.exception("request could not be taken in", seq=job.seq)
            await self._refuse(job, format, TrineError("internal error while reading the request"))
            return
        if request is not None:
            self._serve(request)

    async def _prepare(self, job: Job, priority: str, format: Format) -> Request | None:
        """The request, ready to be scheduled. None if it has ended already."""
        generate = parse(job.data, self._subjects.model)
        deadline = (generate.deadline_ms or self._settings.deadline_s * 1000) / 1000 - job.age
        if deadline <= 0:
            raise DeadlineExceeded(f"queued for {job.age:.1f} s, beyond its deadline")
        if job.delivered > MAX_DELIVERIES:
            raise Unavailable(f"given up after {MAX_DELIVERIES} attempts")
        prompt = await anyio.to_thread.run_sync(tokenise, generate, self._tokenizer, self._info)
        history = await self._history(generate, job)
        if history.ended or history.foreign:
            self._counters["duplicate_requests"] += int(history.foreign)
            await job.ack()
            return None
        if generate.id in self._cancelled:
            await self._finish_cancelled(job, generate, format, history)
            raise Cancelled
        return self._request(generate, job, priority, format, prompt, history, deadline)

    async def _history(self, generate: Generate, job: Job) -> History:
        """A first delivery has none, in all likelihood: its first append finds out. Later ones read what was sent."""
        if job.delivered == 1:
            return History()
        self._counters["redeliveries"] += 1
        return await read_history(self._bus, self._subjects, generate.id, job.seq)

    def _request(
        self,
        generate: Generate,
        job: Job,
        priority: str,
        format: Format,
        prompt: list[int],
        history: History,
        deadline: float,
    ) -> Request:
        sequence = make_sequence(generate, prompt, history, self._info, self._root, priority)
        completion = Completion(self._tokenizer.detokenizer(), self._info.eos_ids, generate.stops, sequence.max_tokens)
        events = EventWriter(
            self._bus,
            self._subjects,
            generate.id,
            job.seq,
            attempt=job.delivered,
            seed=sequence.seed,
            format=format,
            history=history,
        )
        for token in history.tokens:  # the text state, and the end if the last attempt died before saying it
            if completion.finished is None:
                completion.push(token)
        return Request(generate, job, sequence, completion, events, deadline=time.monotonic() + deadline)

    # Refusing

    async def _refuse(self, job: Job, format: Format, error: TrineError) -> None:
        """One typed event to the request's own subject, if its id can be read, else to the subject of refusals."""
        self._counters[f"refused_{error.code}"] += 1
        request_id = readable_id(job.data)
        log.info("request refused", request=request_id, code=error.code, error=error.message)
        event = Failed(
            id=request_id or f"seq-{job.seq}",
            attempt=job.delivered,
            code=error.code,
            message=error.message,
            field=error.field,
        )
        await self._answer(job, event, format, self._subjects.events(request_id) if request_id else None)

    async def _finish_cancelled(self, job: Job, generate: Generate, format: Format, history: History) -> None:
        event = Finished(
            id=generate.id,
            attempt=job.delivered,
            reason="cancelled",
            seed=history.seed or 0,
            usage=Usage(completion_tokens=len(history.tokens)),
            timings=Timings(queue_ms=job.age * 1e3),
            served_by=ServedBy(decode=self._worker),
        )
        await self._answer(job, event, format, self._subjects.events(generate.id))

    async def _answer(self, job: Job, event: Failed | Finished, format: Format, subject: str | None) -> None:
        try:
            if subject is None:
                await self._bus.publish(self._subjects.refused, encode(event, Format.JSON))
            else:
                await self._bus.append(subject, encode(event, format), headers={REQUEST_HEADER: str(job.seq)})
            await job.term()
        except BusError as bus_error:
            log.warning("refusal not delivered; comes again", seq=job.seq, error=str(bus_error))


_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,128})"')


def readable_id(data: bytes) -> str | None:
    """The id of a message that is otherwise refused, as far as it can be made out."""
    try:
        if format_of(data) is Format.JSON:
            value = json.loads(data.decode(errors="replace"))
        else:
            value = msgpack.unpackb(data, raw=False, strict_map_key=True)
        found = value.get("id") if isinstance(value, dict) else None
    except (ValueError, RecursionError, TypeError, msgpack.UnpackException):
        match = _ID.search(data, 0, 4096)
        found = match.group(1).decode(errors="replace") if match else None
    return found if isinstance(found, str) and 0 < len(found) <= MAX_ID else None


async def _quietly(action: Awaitable[None]) -> None:
    """For acks that only save time: without them the message comes again after ack_wait."""
    try:
        await action
    except BusError as error:
        log.debug("not acknowledged", error=str(error))
