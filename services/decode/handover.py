"""Hands a pulled request to the decode worker whose pool holds its prefix, and takes what others hand over.

The request stays the same message of the queue: whoever took it acks it. When a reply is lost both workers serve it, as
after a redelivery that came too early: they write the same events, and the event stream lets each in once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import anyio
import structlog

from services.decode.affinity import Affinity
from shared.actor import HURRY
from shared.bus.base import Bus, Incoming, Job
from shared.bus.listening import listen
from shared.cache.blocks import BlockAllocator
from shared.cache.summary import summarise
from shared.codec import decode, encode
from shared.errors import BusError, RequestError
from shared.messages import Handover, HandoverReply, HeldBlocks
from shared.peers import Peers
from shared.subjects import Subjects, priority_of
from shared.telemetry import Counters, rarely
from shared.tracing import UNTRACED, Kind, Span, parent_of

REPLY_S = 0.05
"""Longer is not waited for: then the request is served here."""

log = structlog.get_logger()


class Handovers:
    """`take(job, priority)` is asked for what another worker offers; False refuses it."""

    def __init__(
        self,
        worker: str,
        *,
        bus: Bus,
        subjects: Subjects,
        peers: Peers,
        counters: Counters,
        take: Callable[[Job, str], bool],
        allocator: BlockAllocator,
        beat_s: float,
    ) -> None:
        self._worker = worker
        self._bus = bus
        self._subjects = subjects
        self._peers = peers
        self._allocator = allocator
        self._beat_s = beat_s
        self._affinity = Affinity(allocator.block_size)
        self._counters = counters
        self._take = take

    async def start(self) -> None:
        await listen(self._bus, self._subjects.all_held, self._on_held)
        await listen(self._bus, self._subjects.handover(self._worker), self._on_offer)

    async def tell(self) -> None:
        """Side task: say what the pool holds, soon after it has changed and with every beat."""
        told, at = -1, 0.0
        while True:
            started = time.monotonic()
            if self._allocator.changes != told or started - at >= self._beat_s:
                told, at = self._allocator.changes, started
                with suppress(BusError):
                    held = summarise(self._worker, self._allocator.names())
                    await self._bus.publish(self._subjects.held(self._worker), encode(held))
            # A large pool's summary takes a while: no more than a twentieth of the time goes there.
            await anyio.sleep(max(self._beat_s * HURRY, 20 * (time.monotonic() - started)))

    async def _on_held(self, message: Incoming) -> None:
        try:
            held = decode(message.data, HeldBlocks)
        except RequestError:
            self._counters["bad_messages"] += 1
            return
        if any(beat.worker == held.worker for beat in self._peers.alive("decode", time.monotonic())):
            self._affinity.observe(held)

    async def offer(self, job: Job, names: Sequence[bytes], mine: int, running: int, trace: Span = UNTRACED) -> bool:
        """True if another worker has taken the job. See `Affinity.choose`."""
        beats = self._peers.alive("decode", time.monotonic())
        if (peer := self._affinity.choose(names, mine, running, beats)) is None:
            return False
        offer = Handover(worker=self._worker, handle=job.handle, subject=job.subject, request=job.data)
        span = trace.child("hand over", Kind.PRODUCER, {"trine.peer": peer})
        try:
            answer = await self._bus.request(self._subjects.handover(peer), encode(offer), REPLY_S, span.headers)
            taken = decode(answer.data, HandoverReply).taken
        except (BusError, RequestError):  # it is slow or gone, or the request too large to be sent twice
            taken = False
        if span is not trace:
            span.set({"trine.taken": taken})
            span.end()
        self._counters["handed_over" if taken else "handover_refused"] += 1
        (self._affinity.took if taken else self._affinity.refused)(peer)
        return taken

    async def _on_offer(self, message: Incoming) -> None:
        try:
            offer = decode(message.data, Handover)
            priority = priority_of(offer.subject)
            parent = Span(parent_of(message.headers)).headers
            job = self._bus.adopt(self._subjects.request_stream, offer.handle, offer.subject, offer.request, parent)
        except (RequestError, ValueError) as error:
            self._counters["bad_messages"] += 1
            if rarely(self._counters["bad_messages"]):
                log.warning("bad handover", error=str(error), so_far=self._counters["bad_messages"])
            return
        if message.reply:
            taken = self._take(job, priority)
            self._counters["taken_over"] += int(taken)
            await self._bus.publish(message.reply, encode(HandoverReply(taken=taken)))
