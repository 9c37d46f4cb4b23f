"""Stand-ins for tests: a decode worker without a model, and a bus that loses live events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

from shared.bus.base import Bus, Handler, Incoming, Job, Subscription
from shared.codec import Format, decode, decode_event, encode, format_of
from shared.config import Settings
from shared.errors import SequenceConflict, TrineError
from shared.messages import Beat, Failed, Finished, Generate, ServedBy, Timings, Tokens, Usage
from shared.streams import REQUEST_HEADER, event_stream, request_consumers, request_stream
from shared.subjects import PRIORITIES, Subjects, last


def words(generate: Generate) -> list[str]:
    """The default answer: what was asked, word by word."""
    text = generate.prompt or "".join(m.content or "" for m in generate.messages or ()) or "nothing"
    first, *rest = text.split(" ")
    return [first, *(f" {word}" for word in rest)]


class FakeDecode:
    """Answers requests as a decode worker does, one token per piece of `answer(request)`; token ids count from 100.

    `chunks` sizes the token events in turn. `pause` is in seconds per event. `dies_after` tokens it stops for ever
    without a word, as if killed; another `FakeDecode` on the same broker or server takes over after `ack_wait`.
    """

    def __init__(
        self,
        bus: Bus,
        model: str = "fake",
        worker: str = "decode-1",
        *,
        answer: Callable[[Generate], list[str]] = words,
        chunks: Sequence[int] = (1,),
        pause: float = 0.0,
        dies_after: int | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.bus = bus
        self.model = model
        self.worker = worker
        self.requests: list[Generate] = []
        self.cancelled: set[str] = set()
        self.dead = asyncio.Event()
        self._answer = answer
        self._chunks = chunks
        self._pause = pause
        self._dies_after = dies_after
        self._settings = settings or Settings(model_name=model, ack_wait_s=0.3)
        self._subjects = Subjects(model)
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancels: Subscription | None = None

    async def __aenter__(self) -> FakeDecode:
        await self.ensure_streams()
        self.bus.on_reconnect(self.ensure_streams)
        self._cancels = await self.bus.subscribe(self._subjects.cancels, self._on_cancel)
        for loop in (self._beat(), *(self._pull(priority) for priority in PRIORITIES)):
            self._spawn(loop)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._cancels is not None:
            with contextlib.suppress(TrineError):
                await self._cancels.unsubscribe()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ensure_streams(self) -> None:
        await self.bus.ensure_stream(request_stream(self._subjects, self._settings))
        await self.bus.ensure_stream(event_stream(self._subjects))
        for consumer in request_consumers(self._subjects, self._settings):
            await self.bus.ensure_consumer(consumer)

    def stop(self) -> None:
        """From now on it does nothing any more; what it had taken stays unacknowledged."""
        self.dead.set()
        for task in self._tasks:
            task.cancel()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_cancel(self, message: Incoming) -> None:
        self.cancelled.add(last(message.subject))

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(TrineError):
                beat = Beat(role="decode", worker=self.worker)
                await self.bus.publish(self._subjects.beat("decode", self.worker), encode(beat))
            await asyncio.sleep(0.1)

    async def _pull(self, priority: str) -> None:
        consumer = self._subjects.request_consumer(priority)
        while True:
            try:
                for job in await self.bus.pull(self._subjects.request_stream, consumer, 8, 0.5):
                    self._spawn(self._serve(job))
            except TrineError:
                await asyncio.sleep(0.05)

    async def _serve(self, job: Job) -> None:
        with contextlib.suppress(TrineError):  # another worker has taken over, or the bus is gone: it comes again
            await _Answer(self, job).run()
            await job.ack()


class _Answer:
    """One request being answered by a `FakeDecode`."""

    def __init__(self, fake: FakeDecode, job: Job) -> None:
        self._fake = fake
        self._job = job
        self._format: Format = format_of(job.data)
        self._last_seq = 0

    async def run(self) -> None:
        fake = self._fake
        try:
            request = decode(self._job.data, Generate)
        except TrineError as error:
            await self._store(Failed(id="?", code=error.code, message=error.message, field=error.field), "?")
            return
        fake.requests.append(request)
        pieces = fake._answer(request)[: request.max_tokens]
        index, turn = await self._already(request.id), 0
        while index < len(pieces) and request.id not in fake.cancelled:
            count = fake._chunks[turn % len(fake._chunks)]
            part = pieces[index : index + count]
            await self._store(
                Tokens(
                    id=request.id,
                    attempt=self._job.delivered,
                    index=index,
                    token_ids=list(range(100 + index, 100 + index + len(part))),
                    text="".join(part),
                ),
                request.id,
            )
            index, turn = index + len(part), turn + 1
            if fake._dies_after is not None and index >= fake._dies_after:
                fake.stop()
            await asyncio.sleep(fake._pause)
        await self._store(self._finished(request, index), request.id)

    async def _already(self, request_id: str) -> int:
        """How many tokens this request has stored. Raises SequenceConflict when a later attempt stored some."""
        subjects, index = self._fake._subjects, 0
        for stored in await self._fake.bus.read(subjects.event_stream, subjects.events(request_id)):
            self._last_seq = stored.seq
            if stored.headers.get(REQUEST_HEADER) == str(self._job.seq):
                event = decode_event(stored.data)
                if event.attempt > self._job.delivered:
                    raise SequenceConflict("another worker has taken over")
                index = event.index + len(event.token_ids) if isinstance(event, Tokens) else index
        return index

    def _finished(self, request: Generate, tokens: int) -> Finished:
        return Finished(
            id=request.id,
            attempt=self._job.delivered,
            reason=self._reason(request, tokens),
            seed=request.seed if request.seed is not None else 42,
            usage=Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=tokens),
            timings=Timings(queue_ms=1.0, ttft_ms=2.0, tpot_ms=3.0, total_ms=4.0),
            served_by=ServedBy(decode=self._fake.worker),
        )

    def _reason(self, request: Generate, tokens: int) -> Literal["stop", "length", "cancelled"]:
        if request.id in self._fake.cancelled:
            return "cancelled"
        return "length" if tokens == request.max_tokens else "stop"

    async def _store(self, event: Tokens | Finished | Failed, request_id: str) -> None:
        subject = self._fake._subjects.events(request_id)
        headers = {REQUEST_HEADER: str(self._job.seq)}
        data = encode(event, self._format)
        try:
            self._last_seq = await self._fake.bus.append(subject, data, headers=headers, expect_last=self._last_seq)
        except SequenceConflict:
            await self._already(request_id)  # a stranger wrote to this subject, or somebody has taken over
            self._last_seq = await self._fake.bus.append(subject, data, headers=headers, expect_last=self._last_seq)


class LossyBus:
    """A bus whose subscriptions never see the messages for which `lose` is true; all else goes to `bus`."""

    def __init__(self, bus: Bus, lose: Callable[[Incoming], bool]) -> None:
        self._bus = bus
        self._lose = lose

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        async def pass_on(message: Incoming) -> None:
            if not self._lose(message):
                await handler(message)

        return await self._bus.subscribe(subject, pass_on, queue)
