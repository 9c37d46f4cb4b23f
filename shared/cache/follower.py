"""Keeps a `PrefixIndex` true to the cache's stream, and lets readers wait for blocks that are being computed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence

import structlog

from shared.bus.base import Bus, Stored, StreamSpec, Subscription
from shared.cache.index import PrefixIndex
from shared.cache.naming import NAME_BYTES
from shared.errors import BusError, ConfigError, StreamMissing
from shared.subjects import Subjects, block_of

POLL_S = 0.5
MAX_PAUSE_S = 2.0
FULL = 0.9  # of max_bytes: from here on the stream is about to evict

log = structlog.get_logger(__name__)


class IndexFollower:
    """Feeds the index, polls the eviction horizon, re-creates a stream that vanished. Survives bus errors."""

    def __init__(
        self, bus: Bus, subjects: Subjects, index: PrefixIndex, spec: StreamSpec, poll: float = POLL_S
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._index = index
        self._spec = spec
        self._poll_s = poll
        self._counters: Counter[str] = Counter(foreign_subjects=0, bus_errors=0, streams_created=0)
        self.stored_bytes = 0
        """In the stream, when it was last looked at."""
        self._stream_known = False
        self._feed: Subscription | None = None
        self._following = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._hurried = asyncio.Event()
        self._waiting: dict[bytes, set[asyncio.Future[None]]] = {}

    @property
    def counters(self) -> Mapping[str, int]:
        return {**self._counters, "evicted": self._index.evicted}

    async def start(self) -> None:
        """Create or check the stream and begin. Raises ConfigError if the stream differs; bus trouble is retried."""
        self._bus.on_reconnect(self._hurry)
        with contextlib.suppress(BusError):
            await self._ensure()
        self._task = asyncio.create_task(self._run(), name="index-follower")

    async def close(self) -> None:
        """Stop following; whoever waits is answered with what is known."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._feed is not None:
            with contextlib.suppress(BusError):
                await self._feed.unsubscribe()
        for name in list(self._waiting):
            self._wake(name)

    async def restart(self) -> None:
        """Blocks were removed from the stream's middle, of which no feed tells: learn anew what is there."""
        async with self._following:
            feed, self._feed = self._feed, None
            if feed is not None:
                with contextlib.suppress(BusError):
                    await feed.unsubscribe()
            self._index.reset()
        with contextlib.suppress(BusError):  # else the next round does it
            await self._follow()

    async def wait(self, names: Sequence[bytes], timeout: float) -> int:
        """Length of the present prefix of `names` as soon as it is not 0, and at the latest after `timeout` seconds.

        Pass the names that you still lack, first one first. Raises nothing: 0 means that none came in time.
        """
        if not names or self._index.present(names[0]):
            return self._index.longest(names)
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(names[0], set())
        waiting.add(arrival)
        try:
            async with asyncio.timeout(timeout):
                await arrival
        except TimeoutError:
            pass
        finally:
            waiting.discard(arrival)
            if not waiting and self._waiting.get(names[0]) is waiting:
                del self._waiting[names[0]]
        return self._index.longest(names)

    def _wake(self, name: bytes) -> None:
        for arrival in self._waiting.pop(name, ()):
            if not arrival.done():
                arrival.set_result(None)

    def _on_message(self, stored: Stored) -> None:
        try:
            scope, name, part = block_of(stored.subject)
            known = len(name) == NAME_BYTES and self._subjects.block(name, part, scope) == stored.subject
        except ValueError:
            known = False
        if not known:
            self._counters["foreign_subjects"] += 1
        elif self._index.observe(stored.seq, name, part):
            self._wake(name)

    async def _run(self) -> None:
        pause = self._poll_s
        while True:
            try:
                await self._step()
                pause = self._poll_s
            except StreamMissing:
                self._index.reset()
                if self._stream_known:
                    self._stream_known, pause = False, self._poll_s
                    continue
            except Exception as error:  # whatever it is, an index that stops following would lie from then on
                self._counters["bus_errors"] += 1
                pause = min(pause * 2, MAX_PAUSE_S)
                level = log.debug if isinstance(error, BusError) else log.error
                level("cache index cannot follow", error=str(error), kind=type(error).__name__)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._hurried.wait()
                    pause = self._poll_s
            self._hurried.clear()

    async def _hurry(self) -> None:
        """The server may be a new one, which has no stream."""
        self._hurried.set()

    async def _step(self) -> None:
        if not self._stream_known:
            await self._ensure()
        await self._follow()
        await self._poll()

    async def _follow(self) -> None:
        async with self._following:
            if self._feed is None:
                self._feed = await self._bus.follow(self._spec.name, self._subjects.blocks, self._on_message)

    async def _ensure(self) -> None:
        try:
            await self._bus.ensure_stream(self._spec)
        except ConfigError as error:
            raise ConfigError(f"{error.message} (TRINE_CACHE_BYTES is its size)", field="cache_bytes") from None
        self._stream_known = True
        self._counters["streams_created"] += 1

    async def _poll(self) -> None:
        generation, told = self._index.generation, self._index.last_seq
        state = await self._bus.stream_state(self._spec.name)
        self.stored_bytes = state.bytes
        if generation != self._index.generation:
            return  # the answer may be about the stream before
        if state.last_seq < told:
            self._index.reset()  # created anew, and empty so far, or the feed would have told
            return
        full = 0 < FULL * self._spec.max_bytes <= state.bytes
        self._index.horizon(state.first_seq, full=full)
