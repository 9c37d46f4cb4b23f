"""Put a request into the queue, exactly once, and say clearly why that cannot be done."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from shared.bus.base import Bus
from shared.codec import decode, encode, reason
from shared.errors import (
    BusDisconnected,
    BusError,
    InvalidField,
    Overloaded,
    RequestError,
    SequenceConflict,
    StreamFull,
    StreamMissing,
    TooLarge,
    UnknownModel,
)
from shared.messages import MAX_ID, Generate, Room
from shared.subjects import PRIORITIES, Subjects
from shared.tenants import is_tenant
from trine.beats import decoded, listen, nobody

DEFAULT_DEADLINE_S = 600.0
TRACE_BYTES = 128
"""Room for the header that joins a request to a trace."""
APPEND_S = 2.0
"""Of one try: what is published while a cluster elects a leader is lost, and only the next try arrives."""
PATIENCE_S = 20.0
"""An outage at the moment of asking that is longer is the caller's to handle. An election takes 4 to 10 s, and 13 where
cores are busy."""
RETRY_S = 0.25
BEATS_S = 1.5
ROOM_S = 0.5
UNTOLD_S = 1.0
"""How long to wait when no worker says within ROOM_S when there is room."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request ready to be sent."""

    id: str
    model: str
    tenant: str
    priority: str
    data: bytes
    deadline_s: float
    operation: str = "text_completion"
    """As OpenTelemetry's conventions for generative AI have it."""
    parent: str = ""
    """The `traceparent` that the request belongs to."""
    message_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """By which the queue knows a repeat of the same publish. Nobody can guess it: one queue serves all tenants, and who
    publishes with another's message id first has that one's request thrown away."""


def prepare(model: str, tenant: str, priority: str, id: str | None, fields: Mapping[str, Any], max_payload: int) -> Ask:
    """Check a request before anything is sent. Raises InvalidField (naming the field) or TooLarge."""
    if priority not in PRIORITIES:
        raise InvalidField(f"priority: one of {', '.join(PRIORITIES)}", field="priority")
    if not 0 < len(model) <= MAX_ID:
        raise InvalidField(f"model: a name has 1 to {MAX_ID} characters", field="model")
    if not is_tenant(tenant):
        raise InvalidField("tenant: a name is 1 to 64 letters, digits, - and _", field="tenant")
    given = {name: value for name, value in fields.items() if value is not None}
    request_id = uuid.uuid4().hex if id is None else id
    try:
        request = Generate(id=request_id, model=model, **given)
        data = encode(request)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"][:3]) or None
        raise InvalidField(f"{field or 'request'}: {reason(first)}", field=field) from None
    except UnicodeEncodeError as error:
        raise InvalidField(f"text that is not Unicode: {error.reason}") from None
    limit = min(Generate.max_bytes, max_payload - TRACE_BYTES)
    if len(data) > limit:
        raise TooLarge(f"the request has {len(data)} bytes; at most {limit} are accepted")
    deadline_s = request.deadline_ms / 1e3 if request.deadline_ms else DEFAULT_DEADLINE_S
    operation = "chat" if request.messages is not None else "text_completion"
    return Ask(request_id, model, tenant, priority, data, deadline_s, operation)


async def submit(bus: Bus, ask: Ask, headers: Mapping[str, str] | None = None) -> int | None:
    """Publish the request and wait for the queue's ack; returns its sequence there, None when only that is not known.

    Raises Overloaded, which says when to try again; UnknownModel; or BusDisconnected: then nobody knows whether it was
    queued.
    """
    subject = Subjects(ask.model).request(ask.priority, ask.tenant)
    try:
        return await _append(bus, subject, ask, headers)
    except StreamFull:
        raise await _overloaded(bus, ask.model) from None
    except StreamMissing:
        raise UnknownModel(await _unknown(bus, ask.model), field="model") from None


async def _append(bus: Bus, subject: str, ask: Ask, headers: Mapping[str, str] | None) -> int | None:
    """Retries while NATS is away for a moment; the message id makes a second try harmless."""
    started = time.monotonic()
    while True:
        try:
            return await bus.append(subject, ask.data, headers=headers, message_id=ask.message_id, timeout=APPEND_S)
        except SequenceConflict:
            return None  # an earlier try did arrive
        except BusDisconnected:
            if time.monotonic() - started > PATIENCE_S:
                raise
            await asyncio.sleep(RETRY_S)


async def _overloaded(bus: Bus, model: str) -> Overloaded:
    """What to raise; a worker tells when there may be room, or nobody does in time."""
    wait = UNTOLD_S
    with contextlib.suppress(BusError, RequestError):
        answer = await bus.request(Subjects(model).room, b"", ROOM_S)
        wait = decode(answer.data, Room).retry_ms / 1e3
    error = Overloaded(f"the queue of model {model!r} is full; try again in {wait:.1f} s")
    error.retry_after_s = wait
    return error


async def _unknown(bus: Bus, model: str) -> str:
    with contextlib.suppress(BusError):
        return nobody(model, decoded(await listen(bus, BEATS_S)))
    return f"nobody serves model {model!r:.140}"
