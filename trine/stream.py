"""One request on its way: publish it, follow its events, fetch those that were missed, give up at the deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from shared.bus.base import Bus, Incoming, Stored, Subscription
from shared.codec import decode_event
from shared.errors import (
    BusDisconnected,
    BusError,
    DeadlineExceeded,
    RequestError,
    StreamMissing,
    TrineError,
    Unavailable,
    from_code,
)
from shared.messages import Failed, Finished
from shared.streams import REQUEST_HEADER
from shared.subjects import Subjects
from shared.tracing import UNTRACED, Attributes, Kind, Span, of_program
from trine.completion import Completion, Stopwatch, completion
from trine.merge import Delta, EventMerger
from trine.missed import stored_events
from trine.submit import Ask, submit

READ_S = 5.0
GAP_S = 0.05
"""A known gap is looked up in the event stream after so long: the stream may be a moment behind."""
FAILOVER_S = 1.0
"""In so long a client that lost its server of a cluster has another one."""
QUIET_S = 2.0
"""So long without news makes the client look into the event stream; both double with each look in vain."""
MAX_QUIET_S = 10.0
LOST_S = 10.0
"""Events that the event stream does not have either after so long are lost."""
MAX_QUEUED = 4096
"""Events waiting for a slow reader; what comes on top is fetched from the event stream later."""


class Stream:
    """An answer as it comes: `async for delta in stream`, once; afterwards `stream.completion` has all of it.

    Leaving the loop early cancels the request; `async with stream` makes that certain whatever the caller does.
    Iterating raises what went wrong: UnknownModel, Overloaded, DuplicateRequest, or what a worker found wrong with the
    request; BusDisconnected when NATS cannot be reached; DeadlineExceeded at the latest at the request's deadline.
    """

    def __init__(self, bus: Bus, ask: Ask, live: set[Stream]) -> None:
        self.id = ask.id
        self.model = ask.model
        self._bus = bus
        self._ask = ask
        self._live = live
        self._subjects = Subjects(ask.model)
        self._events: asyncio.Queue[Incoming | None] = asyncio.Queue(MAX_QUEUED)
        self._merger = EventMerger()
        self._completion: Completion | None = None
        self._started = self._sent = False
        self._request: int | None = None  # its sequence in the queue; events name it
        self._deadline = 0.0
        self._doubtful = False  # events may have been missed: nothing is final until the event stream has been read
        self._seen = 0  # sequence up to which the event stream has been read
        self._look_at = 0.0  # when to look into it next
        self._vain = 0  # looks since the last news
        self._stuck_since: float | None = None
        self._span = UNTRACED
        self.owes_cancel = False
        """It was given up while NATS was away: the request may be in the queue, and must not run when NATS is back."""

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises Unavailable while it is not complete."""
        if self._completion is None:
            raise Unavailable("the answer is not complete yet")
        return self._completion

    def __aiter__(self) -> AsyncIterator[Delta]:
        if self._started:
            raise RuntimeError("a Stream can be iterated over once")
        self._started = True
        return self._run()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def cancel(self) -> None:
        """Ask the workers to stop; the iteration then ends with finish reason `cancelled`."""
        await self._bus.publish(self._subjects.cancel(self.id, self._ask.tenant), b"")

    async def close(self) -> None:
        """Cancel the request if it is under way. What NATS does not hear now, it is told when it is back."""
        if not self.owes_cancel:
            self._live.discard(self)
        if self._sent and self._merger.terminal is None:
            self._sent = False
            try:
                await self.cancel()
            except BusError:
                self.owes_cancel = True
                self._live.add(self)

    @property
    def expired(self) -> bool:
        """Whether no worker would begin with the request any more."""
        return time.monotonic() >= self._deadline

    def recheck(self) -> None:
        """The connection was interrupted: read the event stream again from its beginning, it may be a new one."""
        self._doubtful, self._seen = True, 0
        with contextlib.suppress(asyncio.QueueFull):
            self._events.put_nowait(None)

    async def _run(self) -> AsyncIterator[Delta]:
        subscription = await self._listen()
        self._span = self._traced()
        self._live.add(self)
        try:
            watch = Stopwatch(time.monotonic())
            self._deadline = time.monotonic() + self._ask.deadline_s
            await self._submit()
            while (end := self._merger.terminal) is None or self._doubtful:
                for delta in await self._next():
                    watch.tokens(len(delta.token_ids), time.monotonic())
                    yield delta
            self._end(end, watch)
        except TrineError as error:
            self._span.end(error.code)
            raise
        finally:
            self._span.end("" if self._completion else "cancelled")
            await self.close()
            await subscription.unsubscribe()

    def _traced(self) -> Span:
        told: Attributes = {
            "gen_ai.operation.name": self._ask.operation,
            "gen_ai.provider.name": "trine",
            "gen_ai.request.model": self.model,
            "trine.request.id": self.id,
        }
        name, headers = f"{self._ask.operation} {self.model}", Span(self._ask.parent).headers
        return of_program().begin(name, Kind.CLIENT, headers, told)

    async def _listen(self) -> Subscription:
        """Raises BusDisconnected when NATS stays away for longer than it takes to reach another server of a cluster."""
        subject, given_up = self._subjects.events(self.id, self._ask.tenant), time.monotonic() + FAILOVER_S
        while True:
            try:
                return await self._bus.subscribe(subject, self._on_event)
            except BusDisconnected:
                if time.monotonic() >= given_up:
                    raise
                await asyncio.sleep(GAP_S)

    async def _submit(self) -> None:
        try:
            async with asyncio.timeout(self._ask.deadline_s):
                self._sent = True  # from here on it may be in the queue, so leaving has to cancel it
                self._request = await submit(self._bus, self._ask, self._span.headers)
        except TimeoutError:
            raise self._too_late() from None
        except RequestError:
            self._sent = False  # a cancel would hit somebody else's request with the same id
            raise
        self._plan(news=True)

    def _end(self, end: Finished | Failed, watch: Stopwatch) -> None:
        if isinstance(end, Failed):
            raise from_code(end.code, end.message, end.field)
        timings = watch.timings(time.monotonic(), end.timings)
        self._completion = completion(self.model, self._merger, end, timings)
        self._span.set(
            {
                "gen_ai.response.finish_reasons": [end.reason],
                "gen_ai.response.time_to_first_chunk": timings.ttft_ms / 1e3,
                "gen_ai.usage.input_tokens": end.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": end.usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": end.usage.cached_tokens,
            }
        )

    def _too_late(self) -> DeadlineExceeded:
        why = "" if self._bus.connected else "; NATS is not reachable"
        return DeadlineExceeded(f"no complete answer within {self._ask.deadline_s:g} s{why}")

    async def _on_event(self, message: Incoming) -> None:
        try:
            self._events.put_nowait(message)
        except asyncio.QueueFull:
            self._doubtful = True

    async def _next(self) -> list[Delta]:
        """Deltas of the next event, or of those found in the event stream. Raises DeadlineExceeded."""
        now = time.monotonic()
        if now >= self._deadline:
            raise self._too_late()
        message = await self._event(min(self._look_at, self._deadline) - now)
        if message is None:
            return await self._catch_up() if time.monotonic() < self._deadline else []
        behind = self._merger.missing
        deltas = self._feed(message)
        if deltas or self._merger.missing != behind:
            self._plan(news=True)
        return deltas

    async def _event(self, timeout: float) -> Incoming | None:
        """The next one; None when there was none in time, and when the event stream is to be looked into at once."""
        if not self._events.empty():
            return self._events.get_nowait()
        try:
            async with asyncio.timeout(timeout):
                return await self._events.get()
        except TimeoutError:
            return None

    def _feed(self, message: Incoming | Stored) -> list[Delta]:
        request = message.headers.get(REQUEST_HEADER)
        if request is not None and self._request is not None and request != str(self._request):
            return []  # an earlier request had the same id
        try:
            event = decode_event(message.data)
        except RequestError:
            return []  # anybody may publish here
        return self._merger.feed(event, stored=isinstance(message, Stored)) if event.id == self.id else []

    async def _catch_up(self) -> list[Delta]:
        """Read what the event stream has beyond what was read of it before; all of it while something is missing."""
        after = 0 if self._merger.missing else self._seen
        left = min(READ_S, self._deadline - time.monotonic())
        deltas: list[Delta] = []
        try:
            stored = await stored_events(self._bus, self._subjects, self.id, self._ask.tenant, after, left)
            self._doubtful = False
            self._identify(stored)
            deltas = [delta for event in stored for delta in self._feed(event)]
            self._seen = max([self._seen, *(event.seq for event in stored)])
        except StreamMissing:
            self._doubtful = False  # there is nothing that could be read
        except BusError:
            pass  # the next look, or the deadline
        self._plan(news=bool(deltas))
        return deltas

    def _identify(self, messages: Sequence[Incoming | Stored]) -> None:
        """Find out which request is meant; called with what is stored. Here the ack of its publish has told."""

    def _lost(self) -> Unavailable:
        return Unavailable("a part of the answer was lost with the event stream; ask again")

    def _plan(self, news: bool) -> None:
        """Decide when to look into the event stream next. Raises Unavailable when events are lost for good."""
        now = time.monotonic()
        self._vain = 0 if news else self._vain + 1
        behind = self._merger.missing
        self._look_at = now + min((GAP_S if behind or self._doubtful else QUIET_S) * 2**self._vain, MAX_QUIET_S)
        if not behind or news:
            self._stuck_since = None
        if behind:
            self._stuck_since = self._stuck_since or now
            if now - self._stuck_since > LOST_S:
                raise self._lost()
