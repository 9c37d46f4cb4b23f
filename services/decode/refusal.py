"""Answers to requests that are not served: one terminal event where the client can hear it, then they leave."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable

import msgpack
import structlog

from shared.bus.base import Bus, Job
from shared.bus.settle import settle
from shared.codec import Format, encode, format_of
from shared.errors import BusError, DuplicateRequest, TrineError
from shared.messages import MAX_ID, Failed, Finished, Generate, ServedBy, Timings, Usage
from shared.streams import REQUEST_HEADER
from shared.subjects import Subjects, tenant_of_request
from shared.telemetry import Counters
from shared.tenants import DEFAULT_TENANT

SMALL = 1 << 16  # bytes; of larger messages only the beginning is looked at
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,128})"')

log = structlog.get_logger()


class Refusals:
    """Raises nothing. What cannot be answered for want of the bus comes again; what can never be is dropped."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        worker: str,
        counters: Counters,
        ensure_streams: Callable[[], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._worker = worker
        self._counters = counters
        self._ensure_streams = ensure_streams

    async def refuse(self, job: Job, error: TrineError, request_id: str | None = None) -> None:
        """To the request's own event subject if its id is known or can be made out, else to the subject of refusals."""
        self._counters[f"refused_{error.code}"] += 1
        request_id = request_id or readable_id(job.data)
        log.info("request refused", request=request_id, code=error.code, error=error.message)
        event = failed(request_id or f"seq-{job.seq}", job.delivered, error)
        await self._answer(job, event, request_id)

    async def duplicate(self, job: Job, request_id: str) -> None:
        """The id is in use. Who listens to it tells the two requests apart by the header that names each."""
        error = DuplicateRequest(f"a request with id {request_id!r} is being served", field="id")
        await self.refuse(job, error, request_id)

    async def cancelled(self, job: Job, generate: Generate) -> None:
        """Of a request that nobody has begun with."""
        event = Finished(
            id=generate.id,
            attempt=job.delivered,
            reason="cancelled",
            seed=generate.seed or 0,
            usage=Usage(),
            timings=Timings(queue_ms=job.age * 1e3),
            served_by=ServedBy(decode=self._worker),
        )
        await self._answer(job, event, generate.id)

    async def _answer(self, job: Job, event: Failed | Finished, request_id: str | None) -> None:
        tenant = _tenant(job)
        try:
            if request_id is None or tenant is None:
                await self._bus.publish(self._subjects.refused(tenant or DEFAULT_TENANT), encode(event, Format.JSON))
            else:
                subject = self._subjects.events(request_id, tenant)
                data = encode(event, format_of(job.data))
                await self._bus.append(subject, data, headers={REQUEST_HEADER: str(job.seq)})
        except BusError as error:
            log.warning("refusal not delivered; the request comes again", seq=job.seq, error=str(error))
            if error.code == "stream_missing":
                await self._ensure_streams()
            return
        except Exception:
            log.exception("refusal cannot be delivered; the request is dropped", seq=job.seq)
        await settle(job.term())


def _tenant(job: Job) -> str | None:
    try:
        return tenant_of_request(job.subject)
    except ValueError:
        return None


def failed(request_id: str, attempt: int, error: TrineError) -> Failed:
    """The event that tells a client of an error."""
    return Failed(id=request_id, attempt=attempt, code=error.code, message=error.message, field=error.field)


def readable_id(data: bytes) -> str | None:
    """The id of a message that is otherwise refused, as far as it can be made out."""
    found = _id_in_json(data) if format_of(data) is Format.JSON else _id_in_msgpack(data[:SMALL])
    usable = isinstance(found, str) and 0 < len(found) <= MAX_ID and found.encode(errors="replace") == _utf8(found)
    return str(found) if usable else None


def _id_in_json(data: bytes) -> object:
    try:
        if len(data) > SMALL:
            raise ValueError
        value = json.loads(data.decode(errors="replace"))
        return value.get("id")
    except (ValueError, RecursionError):
        match = _ID.search(data, 0, SMALL)
        return match.group(1).decode(errors="replace") if match else None


def _id_in_msgpack(head: bytes) -> object:
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(head)
    try:
        for _ in range(unpacker.read_map_header()):
            if unpacker.unpack() == "id":
                return unpacker.unpack()
            unpacker.skip()
    except (ValueError, RecursionError, TypeError, msgpack.UnpackException):
        pass
    return None


def _utf8(text: str) -> bytes:
    """UTF-8, with lone surrogates kept: text that has some differs from its replacement."""
    return text.encode(errors="surrogatepass")
