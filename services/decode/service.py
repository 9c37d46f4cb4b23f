"""The decode worker: takes requests, loads or computes their KV, generates, verifies drafts, publishes tokens."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

import anyio

from services.decode.admission import Admission
from services.decode.attempts import Attempts
from services.decode.config import DecodeSettings
from services.decode.delivery import Delivery
from services.decode.desk import Desk
from services.decode.drafting import Drafting
from services.decode.handover import Handovers
from services.decode.intake import Intake
from services.decode.loading import Loader
from services.decode.publics import PublicPrefixes
from services.decode.refusal import Refusals
from services.decode.replay import Replays
from services.decode.request import Request
from services.decode.room import Rooms
from services.decode.scheduler import MIXED_ON_CPU, DecodeScheduler
from services.decode.sequence import Sequence
from services.decode.steps import Steps
from services.decode.traces import Trace, Traces
from services.decode.unrouted import Unrouted
from shared.bus.base import Bus, ConsumerSpec, Job, StreamSpec
from shared.cache.blocks import BlockAllocator
from shared.cache.claim_log import ClaimLog
from shared.cache.claims import Claims
from shared.cache.host_store import HostStore
from shared.cache.prefix import PrefixCache
from shared.engine.base import StepEngine
from shared.errors import TrineError
from shared.job_actor import JobActor
from shared.messages import Identity, Load
from shared.micro import Report
from shared.sampling.guide import Guides
from shared.streams import decode_streams, request_consumers
from shared.subjects import PRIORITIES
from shared.telemetry import counted
from shared.tokenizer import Tokenizer

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
        publics: PublicPrefixes | None = None,
        guides: Guides | None = None,
    ) -> None:
        """`guides` makes answers have the forms that requests ask for; None: such requests are refused."""
        super().__init__(settings, bus, worker)
        self._settings = settings
        self._engine = engine
        self._info = engine.info
        self._guides = guides
        self._work = anyio.Event()
        self.allocator = BlockAllocator(self._info.kv_blocks, self._info.block_size)
        self.scheduler = DecodeScheduler(
            self.allocator,
            block_size=self._info.block_size,
            context_length=self._info.context_length,
            max_running=settings.max_running,
            step_tokens=settings.step_tokens,
            mixed_tokens=settings.mixed_tokens or (MIXED_ON_CPU if self._info.on_cpu else None),
        )
        host = HostStore.of(settings, engine.identity)
        self._cache = PrefixCache(bulk, self.subjects, settings.cache_bytes, engine, self.allocator, worker, host)
        self._claim_log = ClaimLog(
            bus,
            self.subjects,
            worker,
            counters=self.counters,
            grace_s=2 * settings.beat_s,
            ensure=self.try_ensure_streams,
        )
        self._drafting = Drafting(
            settings, self._info, worker, bus, self.subjects, self.peers, self.counters, self.spawn
        )
        self._refusals = Refusals(bus, self.subjects, worker, self.counters, self.try_ensure_streams)
        attempts = Attempts(worker, self.life, bus, self.subjects, self.peers, settings.beat_s)
        left = self._request_left
        self._desk = Desk(worker, self.scheduler, self._refusals, attempts, self.counters, self.spawn, left)
        loader = Loader(
            settings,
            bus=bus,
            subjects=self.subjects,
            scheduler=self.scheduler,
            engine=engine,
            cache=self._cache,
            claims=Claims(self._claim_log, self._cache, self.peers, self.counters),
            peers=self.peers,
            counters=self.counters,
            spawn=self.spawn,
        )
        self._intake = Intake(
            settings,
            bus=bus,
            subjects=self.subjects,
            tokenizer=tokenizer,
            info=self._info,
            publics=publics or PublicPrefixes(engine.identity),
            counters=self.counters,
            has_room=lambda: self.scheduler.has_room and not self._desk.lines_up,
            serve=self._serve,
            cancel=self._desk.cancel,
            offer=self._offer,
            adopt=self._desk.adopt,
            refusals=self._refusals,
            attempts=attempts,
            traces=Traces(self.tracer, worker, self.subjects.model),
            cancels=self.cancels,
            ensure_streams=self.try_ensure_streams,
        )
        self._admission = Admission(
            self.scheduler,
            self._desk,
            loader,
            guides,
            spawn=self.spawn,
            ready=self._ready,
            room_changed=self._intake.room_changed,
        )
        size = self._info.block_size
        self._deliver = Delivery(self._desk, self._cache, size, self.counters, began=self._has_prompt, ended=self._wake)
        timed = self._drafting.book.stepped
        self._stepper = Steps(engine, self.scheduler, self.in_engine, self._fail_sequence, self.counters, timed)
        self._handovers = Handovers(
            worker,
            bus=bus,
            subjects=self.subjects,
            peers=self.peers,
            counters=self.counters,
            take=self._take,
            allocator=self.allocator,
            beat_s=settings.beat_s,
        )
        self._replays = Replays(bus, self.subjects, self.counters)
        self._unrouted = Unrouted(bus, self.subjects)
        self._rooms = Rooms(
            bus,
            self.subjects,
            settings.max_queued,
            self.counters,
            busy=lambda: bool(self._desk.requests),
            askers=lambda: 1 + len(self.peers.alive("decode", time.monotonic())),
        )

    # Actor

    def streams(self) -> list[StreamSpec]:
        """Without that of blocks: the cache looks after it, and a worker serves when it is not there."""
        return decode_streams(self.subjects, self.settings)

    def consumers(self) -> list[ConsumerSpec]:
        return request_consumers(self.subjects, self.settings)

    def identity(self) -> Identity:
        return self._engine.identity

    def vocabulary(self) -> str:
        return self._info.vocabulary

    def more_counters(self) -> Mapping[str, int]:
        return {**self._cache.counters, "preemptions": self.scheduler.preemptions}

    def load(self) -> Load:
        return Load(
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            free_blocks=self.allocator.available,
            blocks=self.allocator.num_blocks,
            cached_blocks=self.allocator.cached,
            host_bytes=self._cache.host_bytes,
            stream_bytes=self._cache.stream_bytes,
            queued=self.queued,
        )

    def report(self, counters: Mapping[str, int]) -> Report:
        ends = {prefix: counted(counters, prefix) for prefix in ("finished_", "failed_", "refused_")}
        errors = ends["failed_"] + ends["refused_"]
        step_ms = counters.get("step_ms", 0)
        return Report("generate", self.subjects.requests[0], sum(ends.values()), errors, step_ms)

    async def setup(self) -> None:
        await self._cache.start()
        await super().setup()
        self.bus.authenticated  # noqa: B018 - asked early: finding it out takes a moment
        for part in (self._unrouted, self._handovers, self._replays, self._rooms):
            await part.start()

    def side_tasks(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {
            **super().side_tasks(),
            "steps": self._steps,
            "publish": self._cache.publish,
            "claims": self._claim_log.run,
            "deadlines": self._watch_deadlines,
            "held": self._handovers.tell,
            "room": self._rooms.watch,
            **{f"intake-{p}": self._intake.loop(p, self.until_bus) for p in PRIORITIES},
        }

    async def drain(self) -> None:
        """Take nothing new, finish what runs; what does not end in time goes back and is continued elsewhere."""
        self._intake.closed = True
        with anyio.move_on_after(self.settings.drain_s):
            await self._desk.empty()
        await self._desk.hand_back()
        await self._claim_log.close()
        await self._cache.close()
        if self._guides is not None:
            await self._guides.close()

    # Requests

    async def _offer(self, job: Job, sequence: Sequence, trace: Trace) -> bool:
        """True if a worker that holds more of the prompt has taken it."""
        if not self._settings.affinity:
            return False
        size = self._info.block_size
        sequence.name_blocks((len(sequence.tokens) - 1) // size, size)
        mine = self.allocator.peek(sequence.names)
        return await self._handovers.offer(job, sequence.names, mine, self.scheduler.running, trace.serve)

    def _take(self, job: Job, priority: str) -> bool:
        wanted = self._intake.wants()
        if wanted:
            self._intake.expect()
            self.spawn(self._intake.take, job, priority)
        return wanted

    def _serve(self, request: Request) -> None:
        self._desk.open(request)
        self._admission.admit()

    def _request_left(self, key: str) -> None:
        if key not in self._desk.requests:
            self._drafting.book.end(key)
            self.hurry_beat()
        self._wake()

    def _ready(self) -> None:
        self._work.set()

    def _wake(self) -> None:
        self._admission.admit()
        self._ready()
        self._intake.room_changed()

    def _fail_sequence(self, sequence: Sequence, error: TrineError) -> None:
        self._desk.fail(self._desk.requests[sequence.id], error)

    def held(self) -> Iterable[Job]:
        return [*self._desk.held(), *self._intake.held()]

    async def cancel(self, key: str) -> None:
        self._desk.cancel(key)
        self._wake()

    async def _watch_deadlines(self) -> None:
        while True:
            await anyio.sleep(TICK_S)
            self._desk.expire(time.monotonic())
            self._wake()

    # Steps

    async def _steps(self) -> None:
        while True:
            self._admission.admit()
            works = self.scheduler.plan(hidden=self._drafting.reads_hidden())
            if not works:
                self._engine.rest()
                self._work = anyio.Event()
                await self._work.wait()
                continue
            for outcome in await self._stepper.run(works):
                self._deliver(outcome)
            await self._drafting.ask(self._desk.requests)

    def _has_prompt(self) -> None:
        """The blocks of a request's prompt are here now."""
        self.hurry_beat()
        self._wake()
