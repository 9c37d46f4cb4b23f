"""Requests that were given up: what there is, and trying one again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.bus.base import Bus
from shared.codec import decode
from shared.errors import InvalidField, NotKept, Overloaded, RequestError, StreamFull, StreamMissing, UnknownModel
from shared.messages import DeadLetter, Generate
from shared.subjects import Subjects, dead_of, priority_of


@dataclass(frozen=True, slots=True)
class Dead:
    """A dead letter; see `shared.messages.DeadLetter`."""

    tenant: str
    id: str
    priority: str
    at: float
    attempts: int
    workers: list[str]
    code: str
    reason: str
    bytes: int
    """Of the request; 0: it was too large to be kept."""


async def dead(bus: Bus, model: str, tenant: str | None = None) -> list[Dead]:
    """Those of a tenant, or all; the latest first. Raises UnknownModel, BusError."""
    subjects = Subjects(model)
    letters = await _letters(bus, subjects, subjects.dead(None, tenant))
    return sorted((_dead(letter) for letter in letters), key=lambda d: -d.at)


async def find(bus: Bus, model: str, request_id: str, tenant: str | None = None) -> tuple[Dead, bytes]:
    """The one with this id, and the request as it came in. Raises NotKept, UnknownModel, BusError; InvalidField where
    several tenants have one and none is named.
    """
    letter = await _one(bus, Subjects(model), request_id, tenant)
    return _dead(letter), letter.request


async def retry(bus: Bus, model: str, request_id: str, tenant: str | None = None) -> int:
    """Queue the request again as it came in, under the same id: its events go to the same subject, with the number
    that is returned in their header `Trine-Request`. Its deadline counts anew. The dead letter goes.

    Raises what `find` raises, Overloaded, and NotKept for a request that was too large to be kept.
    """
    subjects = Subjects(model)
    letter = await _one(bus, subjects, request_id, tenant)
    if not letter.request:
        raise NotKept(f"request {request_id!r} was too large to be kept beside what is known of it")
    priority = _dead(letter).priority
    try:
        seq = await bus.append(subjects.request(priority, letter.tenant), letter.request)
    except StreamFull:
        raise Overloaded(f"the queue of model {model!r} is full; try again in a moment") from None
    await bus.purge(subjects.dead_stream, subjects.dead(letter.id, letter.tenant))
    return seq


async def _one(bus: Bus, subjects: Subjects, request_id: str, tenant: str | None) -> DeadLetter:
    if not request_id:
        raise InvalidField("id: it is empty", field="id")
    found = await _letters(bus, subjects, subjects.dead(request_id, tenant))
    if not found:
        raise NotKept(f"no dead letter of a request {request_id!r}")
    if len(found) > 1:
        tenants = ", ".join(sorted(letter.tenant for letter in found))
        raise InvalidField(f"tenant: several have a request {request_id!r}: {tenants}", field="tenant")
    return found[0]


async def _letters(bus: Bus, subjects: Subjects, pattern: str) -> list[DeadLetter]:
    """Those whose subject says the same of them as they do: anybody who may publish there could say anything."""
    try:
        counts = await bus.subject_counts(subjects.dead_stream, pattern)
        stored = await bus.get_many(subjects.dead_stream, list(counts))
    except StreamMissing:
        raise UnknownModel(f"no decode workers of a model {subjects.model!r} have run here", field="model") from None
    found: list[DeadLetter] = []
    for subject, message in stored.items():
        try:
            letter = decode(message.data, DeadLetter)
            if dead_of(subject) == (letter.tenant, letter.id):
                priority_of(letter.subject)
                found.append(letter)
        except (RequestError, ValueError):
            continue
    return found


def _dead(letter: DeadLetter) -> Dead:
    return Dead(
        letter.tenant,
        letter.id,
        priority_of(letter.subject),
        letter.at,
        letter.attempts,
        letter.workers,
        letter.code,
        letter.reason,
        len(letter.request),
    )


def readable(data: bytes) -> dict[str, Any] | None:
    """The request's fields, None for bytes that are no request."""
    try:
        return decode(data, Generate).model_dump(exclude_none=True)
    except RequestError:
        return None
