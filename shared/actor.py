"""Base of all workers: one task group, named side tasks, a beat, draining on SIGTERM, one thread for forward passes."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal, TypeVar

import anyio
import anyio.lowlevel
import structlog
from anyio.abc import TaskGroup

from shared import tracing
from shared.bus.base import Bus, ConsumerSpec, Incoming, StreamSpec
from shared.bus.listening import listen
from shared.codec import decode, encode
from shared.config import Settings
from shared.errors import BadMessage, BusError, ConfigError, RequestError
from shared.messages import MAX_COUNTERS, Beat, Identity, Load
from shared.micro import Micro, Report
from shared.peers import Peers, stays
from shared.subjects import Subjects
from shared.telemetry import Counters, rarely

T = TypeVar("T")
Role = Literal["prefill", "decode", "drafter"]
RETRY_S = 0.5
SAY_EVERY_S = 10.0
"""Between two lines about what a worker waits for."""
JOIN_BEATS = 1.25
"""So many beats' time a worker listens for others before it joins, unless it hears one like itself: they answer a
newcomer at once, and else with their next beat."""
JOIN_POLL_S = 0.01
HURRY = 0.2
"""The part of the time between two beats after which a beat with news may come."""


class SideTaskEnded(Exception):
    """A side task returned although the worker was not stopping. The worker must not go on half alive."""


class Actor:
    """One worker. Subclasses say which streams they need, what runs beside what, and how they drain.

    A side task that ends or raises stops the whole worker with that error; the supervisor starts it again.
    Bus trouble is not such an error: side tasks retry it themselves (`until_bus`).
    """

    role: ClassVar[Role]

    def __init__(self, settings: Settings, bus: Bus, worker: str) -> None:
        self.settings = settings
        self.bus = bus
        self.worker = worker
        self.life = secrets.token_hex(4)
        """Tells this process from others that have had or will have the worker's name."""
        self.subjects = Subjects(settings.served_name)
        self.peers = Peers(settings.peer_timeout_s)
        self.counters = Counters()
        self.tracer = tracing.tracer()
        self.draining = anyio.Event()
        self.ready = anyio.Event()
        self.log = structlog.get_logger().bind(role=self.role, worker=worker)
        self._news = anyio.Event()
        self._group: TaskGroup | None = None
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    # What subclasses provide

    def streams(self) -> list[StreamSpec]:
        return []

    def consumers(self) -> list[ConsumerSpec]:
        return []

    async def setup(self) -> None:
        """Subscribe mailboxes. Streams exist already."""

    def side_tasks(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {}

    async def drain(self) -> None:
        """Finish or hand back all work. Called once, after `draining` is set; the beat says so meanwhile."""

    def identity(self) -> Identity | None:
        return None

    def vocabulary(self) -> str:
        return ""

    def hidden_size(self) -> int:
        """Of a drafter: channels of the target's hidden states that it reads; 0: none."""
        return 0

    def more_counters(self) -> Mapping[str, int]:
        """Counts kept by this worker's parts, for the beat."""
        return {}

    def load(self) -> Load:
        return Load()

    def report(self, counters: Mapping[str, int]) -> Report:
        """For `nats micro`: where it takes work, and how that goes, from its counters."""
        return Report(self.role, self.subjects.prefix, 0, 0, counters.get("step_ms", 0))

    # Life

    async def run(self) -> None:
        """Live until drained. Raises what a side task raised, ConfigError for a worker that does not fit the others."""
        try:
            await self.ensure_streams()
            self.bus.on_reconnect(self.ensure_streams)
            await listen(self.bus, self.subjects.beats, self._on_beat)
            await Micro(self.bus, self.role, self.worker, self._report).start()
            await self._join()
            await self.setup()
            async with anyio.create_task_group() as group:
                self._group = group
                for name, task in {"beat": self._beat, **self.side_tasks()}.items():
                    group.start_soon(self._guard, name, task, name=name)
                self.ready.set()
                self.log.info("ready", model=self.settings.served_name)
                await self.draining.wait()
                self.log.info("draining")
                await self.drain()
                group.cancel_scope.cancel()
            self.log.info("stopped")
        finally:
            self._engine_thread.shutdown(wait=False, cancel_futures=True)

    def _report(self) -> Report:
        beat = self.beat()
        state = "joining" if beat.joining else "draining" if beat.draining else "serving"
        told = {"model": self.settings.served_name, "worker": self.worker, "state": state, "life": self.life}
        if beat.identity is not None:
            told |= {"fingerprint": beat.identity.fingerprint, "codec": beat.identity.codec}
        data = {**beat.load.model_dump(), "counters": beat.counters}
        return replace(self.report(beat.counters), metadata=told, data=data)

    async def _join(self) -> None:
        """Returns when this worker may serve beside those that live. Raises ConfigError, naming what differs.

        Of those that start together and differ, some give way (`peers.stays`). Who has heard a worker like itself that
        serves joins, whatever others say of themselves: anybody may say so on an open server.
        """
        if (mine := self.identity()) is None:
            return
        await self._say_beat()
        deadline = time.monotonic() + JOIN_BEATS * self.settings.beat_s
        while True:
            now = time.monotonic()
            fleet, starting = self.peers.fleet(now), [(self.worker, mine), *self.peers.joining(now)]
            if any(identity == mine for _, identity in fleet):
                return
            if now >= deadline:
                break
            await anyio.sleep(JOIN_POLL_S)
        worker, identity = fleet[0] if fleet else stays(starting)
        if identity != mine:
            raise ConfigError(
                f"this worker differs from those that serve {self.settings.served_name!r}: "
                f"{'; '.join(mine.differences(identity))} ({worker}). Another model needs another name "
                "(TRINE_MODEL_NAME), another configuration workers that are stopped first"
            )

    async def _logged(self, name: str, task: Callable[[], Awaitable[object]]) -> None:
        try:
            await task()
        except Exception:
            self.log.exception("task died; stopping", task=name)
            raise

    async def _guard(self, name: str, task: Callable[[], Awaitable[None]]) -> None:
        await self._logged(name, task)
        if not self.draining.is_set():
            self.log.error("side task ended; stopping", task=name)
            raise SideTaskEnded(name)

    def spawn(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task of this worker beside the others; it ends with the worker, and an error in it ends the worker."""
        if self._group is None:
            raise RuntimeError("the worker is not running")
        self._group.start_soon(self._logged, function.__qualname__, partial(function, *args))

    async def in_engine(self, function: Callable[..., T], *args: object) -> T:
        """Run a blocking forward pass in this worker's one engine thread. Cancellation waits for it to end."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        future = asyncio.get_running_loop().run_in_executor(self._engine_thread, partial(function, *args))
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()

    async def until_bus(self, action: Callable[[], Awaitable[T]]) -> T:
        """Repeat `action` until the bus lets it through; re-creates streams that went away with a restarted server."""
        while True:
            try:
                return await action()
            except BusError as error:
                self.counters["bus_retries"] += 1
                self.log.debug("bus trouble; retrying", error=str(error))
                await anyio.sleep(RETRY_S)
                if error.code == "stream_missing":
                    await self.try_ensure_streams()

    async def ensure_streams(self) -> None:
        """Create what is missing; ConfigError if what exists differs. Waits for the bus, and for who may create it."""
        said = float("-inf")
        while True:
            try:
                return await self._ensure()
            except BusError as error:
                self.counters["bus_retries"] += 1
                if time.monotonic() - said >= SAY_EVERY_S:
                    said = time.monotonic()
                    self.log.warning("waiting for streams", reason=error.message)
                await anyio.sleep(RETRY_S)

    async def _ensure(self) -> None:
        for stream in self.streams():
            await self.bus.ensure_stream(stream)
        for consumer in self.consumers():
            await self.bus.ensure_consumer(consumer)

    async def try_ensure_streams(self) -> None:
        try:
            await self._ensure()
        except (BusError, ConfigError) as error:
            self.log.warning("streams not ensured", error=str(error))

    # Beats

    def beat(self) -> Beat:
        return Beat(
            role=self.role,
            worker=self.worker,
            life=self.life,
            identity=self.identity(),
            vocabulary=self.vocabulary(),
            hidden_size=self.hidden_size(),
            draining=self.draining.is_set() or not self.ready.is_set(),
            joining=not self.draining.is_set() and not self.ready.is_set(),
            counters=dict(itertools.islice(self._all_counters(), MAX_COUNTERS)),
            load=self.load(),
        )

    def _all_counters(self) -> Iterator[tuple[str, int]]:
        bus = {name: count for name, count in self.bus.counters.items() if count}
        return iter({**self.counters, **bus, **self.more_counters()}.items())

    async def _beat(self) -> None:
        while True:
            await self._say_beat()
            await anyio.sleep(self.settings.beat_s * HURRY)
            with anyio.move_on_after(self.settings.beat_s * (1 - HURRY)):
                await self._news.wait()
            self._news = anyio.Event()

    def hurry_beat(self) -> None:
        """There is news: the next beat comes early."""
        self._news.set()

    async def _say_beat(self) -> None:
        try:
            await self.bus.publish(self.subjects.beat(self.role, self.worker), encode(self.beat()))
        except BusError:
            self.counters["beats_unsent"] += 1

    async def _on_beat(self, message: Incoming) -> None:
        try:
            beat = decode(message.data, Beat)
            if message.subject != self.subjects.beat(beat.role, beat.worker):
                # The server's permissions say who may beat as what; the message alone proves nothing.
                raise BadMessage("a beat on another worker's subject")
        except RequestError as error:
            self.counters["bad_messages"] += 1
            if rarely(self.counters["bad_messages"]):
                self.log.warning("bad beat", error=str(error), so_far=self.counters["bad_messages"])
            return
        if beat.worker == self.worker:
            return
        if self.peers.observe(beat, time.monotonic()):
            await self._say_beat()  # a newcomer need not wait for our next one
        mine = self.identity()
        if mine is not None and (differences := self.peers.mismatch(beat, mine, self.vocabulary())):
            self.counters["mismatched_peers"] += 1
            self.log.warning("not pairing with a peer that differs", peer=beat.worker, differs=differences)
