"""What the event stream has of a request's events: read there, or asked of a worker where only that is allowed."""

from __future__ import annotations

import time
from weakref import WeakKeyDictionary

from shared.bus.base import Bus, Stored
from shared.codec import decode, encode
from shared.errors import BusDisconnected, PermissionDenied, RequestError
from shared.messages import Again, Missed
from shared.streams import REQUEST_HEADER
from shared.subjects import Subjects

_denied: WeakKeyDictionary[Bus, dict[str, int]] = WeakKeyDictionary()
"""The event streams that a bus may not read, each with the number of its connection that was told so: the next one may
be another user's, or have other rights. Asking again would bring nothing, and a warning in two logs each time.
"""
MAX_DENIED = 1024


async def stored_events(
    bus: Bus, subjects: Subjects, request_id: str, tenant: str, after: int, timeout: float
) -> list[Stored]:
    """Those with sequence > `after`, in order. Raises StreamMissing, BusError."""
    subject = subjects.events(request_id, tenant)
    deadline = time.monotonic() + timeout
    denied, connection = _denied.setdefault(bus, {}), bus.counters["reconnects"]
    if denied.get(subjects.event_stream) != connection:
        try:
            return await bus.read(subjects.event_stream, subject, after=after, timeout=timeout)
        except PermissionDenied:
            if len(denied) >= MAX_DENIED:
                denied.clear()
            denied[subjects.event_stream] = connection
    return await _told_again(bus, subjects, request_id, tenant, after, deadline)


async def _told_again(
    bus: Bus, subjects: Subjects, request_id: str, tenant: str, after: int, deadline: float
) -> list[Stored]:
    """By a worker."""
    subject = subjects.events(request_id, tenant)
    found: list[Stored] = []
    more = True
    while more:
        left = deadline - time.monotonic()
        if left <= 0:
            raise BusDisconnected("no worker told in time what was missed")
        after = found[-1].seq if found else after
        answer = await bus.request(subjects.again(request_id, tenant), encode(Again(after=after)), left)
        try:
            page = decode(answer.data, Missed)
        except RequestError as error:
            raise BusDisconnected(f"not an answer to what was missed: {error.message}") from None
        found += [
            Stored(subject, e.seq, e.data, {REQUEST_HEADER: e.request}, len(e.data))
            for e in page.events
            if e.seq > after
        ]
        more = page.more and bool(page.events)
    return found
