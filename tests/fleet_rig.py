"""A whole fleet in one process: real services on an in-memory bus, with engines whose answers show any wrong block."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import structlog

from services.decode.config import DecodeSettings
from services.decode.publics import PublicPrefixes
from services.decode.service import DecodeWorker
from services.drafter.config import DrafterSettings
from services.drafter.service import DrafterWorker
from services.drafter.sources.base import Stepping
from services.drafter.sources.model import ModelSource
from services.drafter.sources.suffix import SuffixSource
from services.prefill.config import PrefillSettings
from services.prefill.service import PrefillWorker
from shared.actor import Actor
from shared.bus.base import Bus
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.engine.base import StepEngine
from shared.sampling.guide import Guides
from shared.tokenizer import Tokenizer
from tests.fake_engine import FakeEngine, FakeTokenizer
from trine.client import Client

MODEL = "fake"
COMMON: dict[str, Any] = {
    "model_name": MODEL,
    "block_size": 4,
    "ack_wait_s": 0.4,
    "beat_s": 0.05,
    "peer_timeout_s": 0.3,
    "drain_s": 2.0,
    "host_cache_mb": 0,
}


def joins_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers join without having heard others, as those may that start together."""

    async def join(worker: Actor) -> None:
        await worker._say_beat()

    monkeypatch.setattr(Actor, "_join", join)


class FleetRig:
    """Start workers by role, kill them without a word, ask them through the real client.

    When a worker dies by itself, the test is interrupted and fails with that worker's error.
    """

    def __init__(self) -> None:
        # Tracebacks without locals: there are whole sequences in them.
        console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        structlog.configure(processors=[structlog.processors.add_log_level, console])
        self.broker = MemoryBroker()
        self.workers: dict[str, Actor] = {}
        self.engines: dict[str, FakeEngine] = {}
        self.publics: PublicPrefixes | None = None
        """Of the decode workers to come, as is the tokenizer."""
        self.tokenizer = FakeTokenizer()
        self.guides: Guides | None = None
        """Of the decode workers to come; they share them."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._buses: dict[str, list[MemoryBus]] = {}
        self._clients: list[Client] = []
        self._test: asyncio.Task[Any] | None = None
        self._died: BaseException | None = None

    async def __aenter__(self) -> FleetRig:
        self._test = asyncio.current_task()
        return self

    async def __aexit__(self, *_: object) -> None:
        test, self._test = self._test, None
        if test is not None and self._died is not None:
            test.uncancel()
        for client in self._clients:
            await client.close()
        for name in list(self.workers):
            await self.kill(name)
        if self._died is not None:
            raise self._died

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Ends the test as `asyncio.TaskGroup` would: whatever it waits for may never come now."""
        if task.cancelled() or task.exception() is None or self._died is not None:
            return
        self._died = task.exception()
        if self._test is not None:
            self._test.cancel()

    def bus(self, owner: str = "test") -> MemoryBus:
        bus = MemoryBus(self.broker)
        self._buses.setdefault(owner, []).append(bus)
        return bus

    def client(self, tenant: str | None = None) -> Client:
        client = Client(model=MODEL, tenant=tenant, bus=cast("Bus", self.bus()))
        self._clients.append(client)
        return client

    async def decode(self, name: str = "decode-1", engine: StepEngine | None = None, **overrides: Any) -> DecodeWorker:
        settings = DecodeSettings(**{**COMMON, "local_prefill_tokens": 8, "prefill_patience_s": 1.0, **overrides})
        engine = self._engine(name, engine)
        tokenizer = cast("Tokenizer", self.tokenizer)
        bus, bulk = self.bus(name), self.bus(name)
        worker = DecodeWorker(settings, bus, bulk, name, engine, tokenizer, self.publics, self.guides)
        await self._start(name, worker)
        return worker

    async def prefill(
        self, name: str = "prefill-1", engine: StepEngine | None = None, **overrides: Any
    ) -> PrefillWorker:
        settings = PrefillSettings(**{**COMMON, "chunk_tokens": 16, **overrides})
        engine = self._engine(name, engine)
        worker = PrefillWorker(settings, self.bus(name), self.bus(name), name, engine)
        await self._start(name, worker)
        return worker

    async def drafter(
        self,
        name: str = "drafter-1",
        engine: StepEngine | None = None,
        source: Stepping | None = None,
        **overrides: Any,
    ) -> DrafterWorker:
        """`source`: what guesses, if it is not the engine."""
        settings = DrafterSettings(**{**COMMON, "draft_source": "model", **overrides})
        engine = self._engine(name, engine)
        worker = DrafterWorker(
            settings,
            self.bus(name),
            name,
            suffix=SuffixSource(settings.history_tokens) if settings.draft_source != "model" else None,
            model=(source or ModelSource(engine)) if settings.draft_source != "suffix" else None,
            vocabulary=engine.info.vocabulary,
            vocab_size=engine.info.vocab_size,
        )
        await self._start(name, worker)
        return worker

    def _engine(self, name: str, engine: StepEngine | None) -> StepEngine:
        engine = engine or FakeEngine(blocks=128)
        self.engines[name] = cast("FakeEngine", engine)  # a test that gives another one knows
        return engine

    async def _start(self, name: str, worker: Actor) -> None:
        self.workers[name] = worker
        self._tasks[name] = asyncio.create_task(worker.run(), name=name)
        async with asyncio.timeout(5):
            while not worker.ready.is_set():
                if self._tasks[name].done():
                    await self._tasks[name]
                await asyncio.sleep(0.005)
        self._tasks[name].add_done_callback(self._ended)
        await asyncio.sleep(0.1)  # a beat or two, so that the others know

    async def kill(self, name: str) -> None:
        """As SIGKILL does: its connections are gone, nothing is said or finished."""
        if not self._tasks[name].done():
            self._tasks[name].remove_done_callback(self._ended)
        for bus in self._buses.pop(name, []):
            await bus.close()
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del self.workers[name]

    def expect_death(self, name: str) -> None:
        """This worker may die by itself without failing the test; see `dead`."""
        self._tasks[name].remove_done_callback(self._ended)

    async def dead(self, name: str) -> None:
        """Wait until the worker has died by itself; its process is gone then."""
        async with asyncio.timeout(5):
            await asyncio.wait([self._tasks[name]])
        assert self._tasks[name].exception() is not None
        await self.kill(name)

    async def drain(self, name: str) -> None:
        """As SIGTERM does; raises what the worker raised."""
        self.workers[name].draining.set()
        async with asyncio.timeout(10):
            await self._tasks[name]

    async def quiet(self) -> None:
        """Wait until no worker holds a request, then check that no block leaked."""
        decoders = [w for w in self.workers.values() if isinstance(w, DecodeWorker)]
        async with asyncio.timeout(5):
            while any(w.load().running or w.load().waiting or w.allocator.in_use for w in decoders):
                await asyncio.sleep(0.01)
        for worker in decoders:
            worker.scheduler.check_integrity()
