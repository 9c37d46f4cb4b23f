"""The prefill worker: takes jobs, pulls what the cache has, computes the rest in chunks, publishes each full block."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import anyio

from services.prefill.config import PrefillSettings
from services.prefill.loading import Loader
from services.prefill.scheduler import PrefillScheduler, PrefillTask, PrefillWork
from shared.bus.base import Bus, ConsumerSpec, Job, StreamSpec
from shared.bus.settle import settle
from shared.cache.blocks import BlockAllocator
from shared.cache.claim_log import ClaimLog
from shared.cache.claims import Claims, Flight
from shared.cache.host_store import HostStore
from shared.cache.naming import Lineage
from shared.cache.prefix import PrefixCache
from shared.codec import decode
from shared.engine.base import StepEngine
from shared.errors import InvalidField, RequestError
from shared.job_actor import JobActor
from shared.messages import Identity, Load, PrefillJob
from shared.micro import Report
from shared.streams import claim_stream, prefill_consumer, prefill_stream
from shared.telemetry import Spent
from shared.tracing import UNTRACED, Attributes, Kind, Span

PULL_S = 5.0
MAX_DELIVERIES = 2
"""As often as a decode worker's request is tried: who wanted the blocks then computes them itself."""
RETRY_S = 0.2


@dataclass(slots=True, eq=False)
class _Running:
    job: Job
    request: str
    """`tenants.request_key` of who asked."""
    task: PrefillTask
    started: float = field(default_factory=time.monotonic)
    cached: int = 0
    """Blocks that did not have to be computed."""
    flight: Flight | None = None
    span: Span = UNTRACED
    """Of the whole job; `part` is what it is at."""
    part: Span = UNTRACED
    waits: bool = False
    """For blocks that others compute, and holds nothing here meanwhile."""


class PrefillWorker(JobActor):
    role = "prefill"

    def __init__(self, settings: PrefillSettings, bus: Bus, bulk: Bus, worker: str, engine: StepEngine) -> None:
        super().__init__(settings, bus, worker)
        self._settings = settings
        self._engine = engine
        self._info = engine.info
        self._allocator = BlockAllocator(self._info.kv_blocks, self._info.block_size)
        self._scheduler = PrefillScheduler(
            self._allocator,
            block_size=self._info.block_size,
            chunk_tokens=settings.chunk_tokens,
            max_jobs=settings.max_jobs,
        )
        host = HostStore.of(settings, engine.identity)
        self._cache = PrefixCache(bulk, self.subjects, settings.cache_bytes, engine, self._allocator, worker, host)
        self._claim_log = ClaimLog(
            bus,
            self.subjects,
            worker,
            counters=self.counters,
            grace_s=2 * settings.beat_s,
            ensure=self.try_ensure_streams,
        )
        self._claims = Claims(self._claim_log, self._cache, self.peers, self.counters)
        self._loader = Loader(self._scheduler, self._allocator, self._cache, self._claims)
        self._running: dict[int, _Running] = {}
        self._spent = Spent()
        self._changed = anyio.Event()

    # Actor

    def streams(self) -> list[StreamSpec]:
        """Without that of blocks: the cache looks after it, and a worker serves when it is not there."""
        replicas = self.settings.nats_replicas
        return [prefill_stream(self.subjects, replicas), claim_stream(self.subjects, replicas)]

    def consumers(self) -> list[ConsumerSpec]:
        return [prefill_consumer(self.subjects, self.settings)]

    def identity(self) -> Identity:
        return self._engine.identity

    def vocabulary(self) -> str:
        return self._info.vocabulary

    def more_counters(self) -> Mapping[str, int]:
        return {**self._cache.counters, **self._spent.counts}

    def load(self) -> Load:
        return Load(
            running=len(self._running),
            free_blocks=self._allocator.available,
            blocks=self._allocator.num_blocks,
            cached_blocks=self._allocator.cached,
            host_bytes=self._cache.host_bytes,
            stream_bytes=self._cache.stream_bytes,
            queued=self.queued,
        )

    def report(self, counters: Mapping[str, int]) -> Report:
        refused = counters.get("jobs_refused", 0)
        done, step_ms = counters.get("jobs_done", 0), counters.get("step_ms", 0)
        return Report("prefill", self.subjects.prefills, done + refused, refused, step_ms)

    async def setup(self) -> None:
        await self._cache.start()
        await super().setup()

    def side_tasks(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {
            **super().side_tasks(),
            "intake": self._intake,
            "steps": self._steps,
            "publish": self._cache.publish,
            "claims": self._claim_log.run,
        }

    async def drain(self) -> None:
        """Finish the jobs at hand; hand back those that take too long."""
        with anyio.move_on_after(self._settings.drain_s):
            while self._running:
                await self._changed.wait()
        for running in list(self._running.values()):
            self._forget(running)
            await settle(running.job.nak())
        await self._claim_log.close()
        await self._cache.close()

    # Jobs

    async def _intake(self) -> None:
        while not self.draining.is_set():
            if self._full():
                await self._changed.wait()
                continue
            for job in await self.until_bus(self._pull):
                await self._accept(job)
        await anyio.sleep_forever()  # draining: `run` ends this task

    def _full(self) -> bool:
        """Those that wait for others leave room for as many again."""
        waiting = sum(running.waits for running in self._running.values())
        return len(self._running) - min(waiting, self._settings.max_jobs) >= self._settings.max_jobs

    async def _pull(self) -> list[Job]:
        return await self.bus.pull(self.subjects.prefill_stream, self.subjects.prefill_consumer, 1, PULL_S)

    async def _accept(self, job: Job) -> None:
        if self.draining.is_set():
            await settle(job.nak())
            return
        known = self._running.get(job.seq)
        if known and known.job.stamp == job.stamp:  # redelivered although it runs here: a hold came too late
            known.job = job
            return
        if known:  # the queue was lost with its server, and numbers begin anew: nobody waits for the old one
            self._forget(known)
        try:
            running = self._parse(job)
        except RequestError as error:
            self.counters["jobs_refused"] += 1
            self.log.warning("job refused", error=error.message, field=error.field)
            await settle(job.term())
            return
        if self.cancels.covers(running.request, time.monotonic() - job.age):
            self.counters["cancelled"] += 1
            await settle(job.term())
            return
        self._running[job.seq] = running
        self._trace(running)
        self.spawn(self._prepare, running)

    def _trace(self, running: _Running) -> None:
        told: Attributes = {
            "messaging.system": "nats",
            "trine.worker": self.worker,
            "trine.tokens": len(running.task.tokens),
            "trine.queue_ms": running.job.age * 1e3,
        }
        name = f"prefill {self.subjects.model}"
        running.span = self.tracer.begin(name, Kind.CONSUMER, running.job.headers, told)
        running.part = running.span.child("load")

    def _parse(self, job: Job) -> _Running:
        message = decode(job.data, PrefillJob)
        if message.fingerprint != self._info.fingerprint:
            raise InvalidField("the job is for other weights", field="fingerprint")
        if len(message.token_ids) > self._info.context_length or len(message.token_ids) % self._info.block_size:
            raise InvalidField("not a whole number of blocks within the context", field="token_ids")
        if not message.token_ids or max(message.token_ids) >= self._info.vocab_size:
            raise InvalidField("ids outside the vocabulary", field="token_ids")
        if len(message.token_ids) // self._info.block_size > self._info.kv_blocks:
            raise InvalidField("more blocks than this worker has", field="token_ids")
        if job.age * 1000 > message.budget_ms or job.delivered > MAX_DELIVERIES:
            raise InvalidField(f"too late: delivery {job.delivered} after {job.age:.1f} s", field="budget_ms")
        if message.public_blocks > len(message.token_ids) // self._info.block_size:
            raise InvalidField("more public blocks than blocks", field="public_blocks")
        lineage = Lineage.of(self._engine.identity, message.tenant, message.salt, message.public_blocks)
        task = PrefillTask(str(job.seq), tuple(message.token_ids), lineage, self._info.block_size)
        return _Running(job, message.request, task)

    async def _prepare(self, running: _Running) -> None:
        """Blocks for the job, filled from pool and shared cache as far as they have it; then it joins the steps."""
        task = running.task
        asked = await self._wait_for_others(running)
        while not task.ended and not self._scheduler.admit(task):
            self._land(running)  # others may compute it before there is room here
            asked = False
            with anyio.move_on_after(RETRY_S):  # blocks also come free without a word, when they are published
                await self._changed.wait()
        if not task.ended:
            await self._loader.fetch(task)
        if task.remaining and not task.ended and not asked:
            running.flight = await self._loader.lead(task)
        running.cached = task.have
        running.part.end()
        running.span.set({"trine.cached_blocks": running.cached})
        self.counters["cached_tokens"] += task.have * self._info.block_size
        if task.ended:
            self._land(running)
            return
        for index in range(task.have):  # perhaps evicted from the shared cache, or in one of its tiers only
            self._cache.offer(task.meta(index))
        running.part = running.span.child("compute")
        self._scheduler.start(task)
        self._notify()

    async def _wait_for_others(self, running: _Running) -> bool:
        """While others compute what the job begins with, it holds nothing here. False: it lacks nothing, it seems."""
        if running.task.ended or self._loader.known(running.task) == len(running.task.names):
            return False

        def joins() -> None:
            running.waits = True
            self._notify()

        running.flight = await self._loader.wait(running.task, joins)
        running.waits = False
        return True

    async def _finish(self, running: _Running) -> None:
        """Ack when every block is stored, or was given up by the store: then the decode worker computes it."""
        await self._cache.settled(running.task.names)
        if running.task.ended:  # cancelled or handed back meanwhile, which has settled the job already
            return
        await settle(running.job.ack())
        for span in (running.part, running.span):
            span.end()
        self._forget(running)
        self.counters["jobs_done"] += 1
        self.log.info(
            "job done",
            request=running.request,
            tokens=len(running.task.tokens),
            cached_blocks=running.cached,
            ms=round((time.monotonic() - running.started) * 1e3),
        )

    def _land(self, running: _Running) -> None:
        if running.flight is not None:
            self._claims.end(running.flight)
            running.flight = None

    def _forget(self, running: _Running) -> None:
        for span in (running.part, running.span):
            span.end("unfinished")  # if it has not ended
        self._scheduler.end(running.task)
        self._land(running)
        if self._running.get(running.job.seq) is running:
            del self._running[running.job.seq]
        self._notify()

    def held(self) -> Iterable[Job]:
        return (running.job for running in self._running.values())

    async def cancel(self, key: str) -> None:
        for running in list(self._running.values()):
            if running.request == key:
                self.counters["cancelled"] += 1
                self._forget(running)
                await settle(running.job.term())

    # Steps

    async def _steps(self) -> None:
        finishing: set[PrefillTask] = set()
        while True:
            changed = self._changed
            works = self._scheduler.plan()
            for task in self._scheduler.finished():
                if task not in finishing:
                    finishing.add(task)
                    self.spawn(self._finish, self._running[int(task.id)])
            finishing = {t for t in finishing if not t.ended}
            if not works:
                if all(running.task in finishing for running in self._running.values()):  # none is being loaded
                    self._engine.rest()
                await changed.wait()
                continue
            await self._step(works)

    async def _step(self, works: list[PrefillWork]) -> None:
        try:
            await self.in_engine(self._spent.run, self._engine.step, [w.span for w in works])
        except Exception:
            self.counters["failed_steps"] += 1
            self.log.exception("step failed; its jobs are given back")
            self._scheduler.abandon(works)
            for running in [r for r in self._running.values() if r.task in {w.task for w in works}]:
                self._forget(running)
                await settle(running.job.nak())
            return
        self.counters["prefill_tokens"] += sum(len(w.span.token_ids) for w in works)
        for task, filled in self._scheduler.complete(works):
            self.counters["computed_blocks"] += len(filled)
            for index in filled:
                self._cache.offer(task.meta(index))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
