"""Tells clients again what they missed of their events, when they may not read the event stream themselves.

The server cannot let a tenant read its own subjects of a stream and no others; a worker can, because the tenant is in
the subject of the question.
"""

from __future__ import annotations

import structlog

from shared.bus.base import Bus, Incoming
from shared.bus.listening import listen
from shared.bus.wire import INBOX
from shared.codec import decode, encode
from shared.errors import BusError, RequestError, StreamMissing
from shared.messages import Again, Missed, MissedEvent
from shared.streams import REQUEST_HEADER
from shared.subjects import Subjects, asked_again
from shared.telemetry import Counters

QUEUE = "trine-again"  # one worker of the fleet answers
PAGE_BYTES = 512 << 10

log = structlog.get_logger()


class Replays:
    def __init__(self, bus: Bus, subjects: Subjects, counters: Counters) -> None:
        self._bus = bus
        self._subjects = subjects
        self._counters = counters

    async def start(self) -> None:
        await listen(self._bus, self._subjects.agains, self._on_ask, queue=QUEUE)

    async def _on_ask(self, message: Incoming) -> None:
        try:
            tenant, request_id = asked_again(message.subject)
            after = decode(message.data, Again).after
            if not message.reply.startswith(INBOX):  # it would be published there with this worker's rights
                raise ValueError("no inbox")
        except (ValueError, RequestError):
            self._counters["bad_messages"] += 1
            return
        try:
            answer = await self._missed(self._subjects.events(request_id, tenant), after)
            await self._bus.publish(message.reply, encode(answer))
        except BusError as error:
            log.debug("missed events not told", request=request_id, error=str(error))

    async def _missed(self, subject: str, after: int) -> Missed:
        try:
            stored = await self._bus.read(self._subjects.event_stream, subject, after=after)
        except StreamMissing:
            stored = []
        events: list[MissedEvent] = []
        size = 0
        for event in stored:
            size += len(event.data)
            if events and size > PAGE_BYTES:
                break
            request = event.headers.get(REQUEST_HEADER, "")[:32]
            events.append(MissedEvent(seq=event.seq, request=request, data=event.data))
        return Missed(events=events, more=len(events) < len(stored))
