"""The decode worker: takes requests, loads or computes their KV, generates, verifies drafts, publishes tokens."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

import anyio

from services.decode.config import DecodeSettings
from services.decode.drafting import Drafting
from services.decode.events import Outcome as Written
from services.decode.intake import Intake
from services.decode.loading import Loader
from services.decode.refusal import Refusals, failed
from services.decode.request import Request
from services.decode.scheduler import DecodeScheduler
from services.decode.sequence import Outcome, Sequence
from services.decode.speculation import DraftBook
from services.decode.steps import Steps
from services.decode.unrouted import Unrouted
from shared.bus.base import Bus, ConsumerSpec, Job, StreamSpec
from shared.bus.settle import settle
from shared.cache import naming
from shared.cache.blocks import BlockAllocator
from shared.cache.host_store import HostStore
from shared.cache.prefix import PrefixCache
from shared.engine.base import StepEngine
from shared.errors import ContextLengthExceeded, DeadlineExceeded, TrineError
from shared.job_actor import JobActor
from shared.lifecycle import Phase
from shared.messages import Finished, Identity, Load
from shared.streams import event_stream, prefill_stream, request_consumers, request_stream
from shared.subjects import PRIORITIES
from shared.tokenizer import Tokenizer

TENANT = "default"
TICK_S = 0.25


class DecodeWorker(JobActor):
    role = "decode"

    def __init__(
        self,
        settings: DecodeSettings,
        bus: Bus,
        bulk: Bus,
        worker: str,
        engine: StepEngine,
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(settings, bus, worker)
        self._engine = engine
        self._info = engine.info
        self._requests: dict[str, Request] = {}
        self._work = anyio.Event()
        self._left = anyio.Event()
        root = naming.root(engine.identity, TENANT)
        self.allocator = BlockAllocator(self._info.kv_blocks, self._info.block_size)
        self.scheduler = DecodeScheduler(
            self.allocator,
            block_size=self._info.block_size,
            context_length=self._info.context_length,
            max_running=settings.max_running,
            step_tokens=settings.step_tokens,
        )
        host = HostStore.of(settings, engine.identity)
        self._cache = PrefixCache(bulk, self.subjects, settings.cache_bytes, engine, self.allocator, worker, host)
        self._loader = Loader(
            settings,
            TENANT,
            bus=bus,
            subjects=self.subjects,
            scheduler=self.scheduler,
            engine=engine,
            cache=self._cache,
            peers=self.peers,
            counters=self.counters,
        )
        self._drafting = Drafting(
            DraftBook(settings.draft_depth, self._info.vocab_size),
            worker,
            settings.draft_wait_ms / 1e3,
            bus,
            self.subjects,
            self.peers,
            self.counters,
        )
        self._refusals = Refusals(bus, self.subjects, worker, self.counters, self.try_ensure_streams)
        self._intake = Intake(
            settings,
            bus=bus,
            subjects=self.subjects,
            tokenizer=tokenizer,
            info=self._info,
            root=root,
            counters=self.counters,
            has_room=lambda: self.scheduler.has_room,
            serve=self._serve,
            adopt=self._adopt,
            refusals=self._refusals,
            cancels=self.cancels,
            ensure_streams=self.try_ensure_streams,
        )
        self._stepper = Steps(engine, self.scheduler, self.in_engine, self._fail_sequence, self.counters)
        self._unrouted = Unrouted(bus, self.subjects)

    # Actor

    def streams(self) -> list[StreamSpec]:
        return [
            request_stream(self.subjects, self.settings),
            prefill_stream(self.subjects),
            event_stream(self.subjects),
            self._cache.stream,
        ]

    def consumers(self) -> list[ConsumerSpec]:
        return request_consumers(self.subjects, self.settings)

    def identity(self) -> Identity:
        return self._engine.identity

    def vocabulary(self) -> str:
        return self._info.vocabulary

    def more_counters(self) -> Mapping[str, int]:
        return self._cache.counters

    def load(self) -> Load:
        return Load(
            running=self.scheduler.running, waiting=self.scheduler.waiting, free_blocks=self.allocator.available
        )

    async def setup(self) -> None:
        await self._cache.start()
        await super().setup()
        await self._unrouted.start()

    def side_tasks(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {
            **super().side_tasks(),
            "steps": self._steps,
            "publish": self._cache.publish,
            "deadlines": self._watch_deadlines,
            **{f"intake-{p}": self._intake.loop(p, self.until_bus) for p in PRIORITIES},
        }

    async def drain(self) -> None:
        """Take nothing new, finish what runs; what does not end in time goes back and is continued elsewhere."""
        self._intake.closed = True
        with anyio.move_on_after(self.settings.drain_s):
            while self._requests:
                await self._left.wait()
        for request in list(self._requests.values()):
            self._forget(request)
            await settle(request.job.nak())
        await self._cache.close()

    # Requests

    def _adopt(self, job: Job) -> bool:
        """A redelivery of what runs here: the earlier hold came too late, nothing is wrong."""
        for request in self._requests.values():
            if (request.job.seq, request.job.stamp) == (job.seq, job.stamp):
                request.job = job
                return True
        return False

    def _serve(self, request: Request) -> None:
        if request.id in self._requests:  # the same id twice at once: the first one has it
            self.spawn(self._refusals.duplicate, request.job, request.id)
            return
        self._requests[request.id] = request
        self.spawn(self._write_events, request)
        if request.completion.finished is not None:
            self._finish(request, request.completion.finished)
            return
        try:
            self.scheduler.submit(request.sequence)
        except ContextLengthExceeded as error:
            self._fail(request, error)
            return
        self._admit()

    async def _write_events(self, request: Request) -> None:
        """The request's events, then its ack: it is done when its end is stored, not before."""
        try:
            outcome = await request.events.run()
        except Exception:
            self.log.exception("events cannot be written", request=request.id)
            outcome = Written.GIVEN_UP
        self.counters[f"events_{outcome.name.lower()}"] += 1
        if outcome is Written.ENDED:
            await settle(request.job.ack())
        elif outcome is Written.DUPLICATE:
            await self._refusals.duplicate(request.job, request.id)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.scheduler.end(request.sequence)
        if self._requests.get(request.id) is request:
            del self._requests[request.id]
            self._drafting.book.end(request.id)
            self._left.set()
            self._left = anyio.Event()
        self._wake()

    def _wake(self) -> None:
        self._admit()
        self._work.set()
        self._intake.room_changed()

    def _admit(self) -> None:
        admitted = self.scheduler.admit()
        for sequence in admitted:
            self.spawn(self._load, self._requests[sequence.id], sequence.epoch)
        if admitted:
            self._intake.room_changed()

    async def _load(self, request: Request, epoch: int) -> None:
        if request.sequence.epoch != epoch:
            return  # preempted before this task's first step
        try:
            left = request.deadline - time.monotonic()
            await self._loader.load(request.sequence, left, request.prefilled_by.update)
            request.events.cached_tokens = request.sequence.cached_tokens or 0
        except Exception:
            self.log.exception("loading failed", request=request.id)
            self._fail(request, TrineError("internal error while loading the prompt's KV"))
        self._work.set()

    def _finish(self, request: Request, reason: str) -> None:
        request.events.end(
            Finished(
                id=request.id,
                attempt=request.job.delivered,
                reason=reason,  # type: ignore[arg-type]
                seed=request.sequence.seed,
                usage=request.usage(),
                timings=request.timings(),
                served_by=request.served_by(self.worker),
            ),
            tail=request.completion.flush(),  # of a cancelled one; empty for the others
        )
        self.scheduler.end(request.sequence)

    def _fail(self, request: Request, error: TrineError) -> None:
        self.counters[f"failed_{error.code}"] += 1
        self.log.warning("request failed", request=request.id, code=error.code, error=error.message)
        request.events.end(failed(request.id, request.job.delivered, error))
        self.scheduler.end(request.sequence)

    def _fail_sequence(self, sequence: Sequence, error: TrineError) -> None:
        self._fail(self._requests[sequence.id], error)

    def held(self) -> Iterable[Job]:
        return (request.job for request in self._requests.values())

    async def cancel(self, request_id: str) -> None:
        if (request := self._requests.get(request_id)) is not None:
            self.counters["cancelled"] += 1
            self._finish(request, "cancelled")
            self._wake()

    async def _watch_deadlines(self) -> None:
        while True:
            await anyio.sleep(TICK_S)
            now = time.monotonic()
            for request in list(self._requests.values()):
                if now > request.deadline and request.sequence.phase is not Phase.ENDED:
                    self._fail(request, DeadlineExceeded("the request's deadline has passed"))
            self._wake()

    # Steps

    async def _steps(self) -> None:
        while True:
            self._admit()
            works = self.scheduler.plan()
            if not works:
                self._work = anyio.Event()
                await self._work.wait()
                continue
            for outcome in await self._stepper.run(works):
                self._deliver(outcome)
            await self._drafting.ask(self._requests)

    def _deliver(self, outcome: Outcome) -> None:
        sequence = outcome.sequence
        request = self._requests[sequence.id]
        for index in outcome.filled:
            self._cache.offer(sequence.meta(index, self._info.block_size))
        if not outcome.tokens:
            return
        if not request.first_token:
            request.first_token = time.monotonic()
        request.drafted += outcome.drafted
        for position, token in enumerate(outcome.tokens):
            delta = request.completion.push(token)
            request.here += 1
            request.accepted += int(position < outcome.accepted)
            request.events.push(token, delta.text)
            if delta.finished is not None:
                self._finish(request, delta.finished)
                self._wake()
                return
