"""Asks drafters for the next tokens of the running sequences, and waits for them no longer than they can save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import anyio
import structlog

from services.decode.config import DecodeSettings
from services.decode.drafters import Ask, readers
from services.decode.request import Request
from services.decode.speculation import DraftBook
from shared import tracing
from shared.bus.base import Bus
from shared.codec import decode, encode
from shared.engine.base import ModelInfo
from shared.errors import BusError, RequestError, TooLarge
from shared.messages import Beat, DraftAsk, Drafts
from shared.peers import Peers
from shared.subjects import Subjects
from shared.telemetry import Counters
from shared.tracing import UNTRACED, Span

ANSWER_S = 2.0
"""An answer is listened for so long, also when no step waits for it any more."""
BESIDE_S = 0.5
"""What a drafter may take to answer an ask that no step waits for."""

log = structlog.get_logger()


class Drafting:
    """The shell around a `DraftBook`. A drafter that is absent, slow, wrong or dead costs speed, never an answer.

    `spawn` runs a task beside the others, as long as the worker lives.
    """

    def __init__(
        self,
        settings: DecodeSettings,
        info: ModelInfo,
        worker: str,
        bus: Bus,
        subjects: Subjects,
        peers: Peers,
        counters: Counters,
        spawn: Callable[..., None],
    ) -> None:
        self.book = DraftBook(
            settings.draft_depth,
            info.vocab_size,
            longest_wait=settings.draft_wait_ms / 1e3,
            step_tokens=settings.step_tokens,
            adaptive=settings.draft_adaptive,
        )
        self._worker = worker
        self._bus = bus
        self._subjects = subjects
        self._peers = peers
        self._counters = counters
        self._spawn = spawn
        self._hidden_size = info.hidden_size
        self._traced = tracing.tracer() is not tracing.OFF

    def reads_hidden(self) -> bool:
        """Whether a drafter reads the engine's hidden states."""
        return self.book.depth > 0 and bool(readers(self._alive(), self._hidden_size))

    def _alive(self) -> list[Beat]:
        return self._peers.alive("drafter", time.monotonic())

    async def ask(self, requests: Mapping[str, Request]) -> None:
        """Fill in `drafts` of the generating sequences among `requests` (by request id)."""
        generating = [r.sequence for r in requests.values() if r.sequence.generating]
        drafters = self._alive()
        names = [beat.worker for beat in drafters]
        asks, wait_s = self.book.plan(generating, names, readers(drafters, self._hidden_size))
        if asks:
            await self._await(asks, wait_s, requests)
        for probe in self.book.probes(r.sequence for r in requests.values() if r.sequence.generating):
            self._counters["draft_probes"] += 1
            self._spawn(self._ask, probe, BESIDE_S, self._span(probe, requests))
        for sequence, source in self.book.settle(r.sequence for r in requests.values() if r.sequence.generating):
            requests[sequence.id].drafted_by.add(source)

    def _span(self, ask: Ask, requests: Mapping[str, Request]) -> Span:
        """What tells of this ask, in the trace of one of the requests that it is for; most asks nothing tells of."""
        if not self._traced:
            return UNTRACED
        of = [request.trace for item in ask.items if (request := requests.get(item.session)) is not None]
        due = [trace for trace in of if trace.asks()]
        return due[0].ask(ask.drafter, len(ask.items), due[1:]) if due else UNTRACED

    async def _await(self, asks: list[Ask], wait_s: float, requests: Mapping[str, Request]) -> None:
        answered = [anyio.Event() for _ in asks]
        for ask, event in zip(asks, answered, strict=True):
            self._spawn(self._ask, ask, wait_s, self._span(ask, requests), event.set)
        with anyio.move_on_after(wait_s):
            for event in answered:
                await event.wait()
        for ask, event in zip(asks, answered, strict=True):
            if not event.is_set():
                self._counters["draft_misses"] += 1
                self.book.missed(ask)

    async def _ask(self, ask: Ask, wait_s: float, span: Span, done: Callable[[], None] = lambda: None) -> None:
        """One ask and whatever comes of it, in time or later."""
        started = time.perf_counter()
        message = DraftAsk(
            worker=self._worker,
            wait_ms=min(max(wait_s * 1e3, 0.1), 60_000.0),
            least=ask.least,
            items=ask.items,
            ended=self.book.take_ended(ask.drafter),
        )
        try:
            reply = await self._bus.request(
                self._subjects.draft(ask.drafter), encode(message), max(ANSWER_S, 2 * wait_s), span.headers
            )
        except TooLarge:
            self._counters["asks_unsent"] += 1
            self.book.unsent(ask)
        except BusError:
            self._counters["drafts_lost"] += 1
            self.book.lost(ask)
        else:
            self._answered(ask, reply.data, time.perf_counter() - started)
        finally:
            span.end()
            done()

    def _answered(self, ask: Ask, data: bytes, seconds: float) -> None:
        try:
            answer = decode(data, Drafts)
        except RequestError as error:
            self._counters["bad_drafts"] += 1
            log.warning("bad drafts ignored", drafter=ask.drafter, error=str(error))
            self.book.lost(ask)
        else:
            self._counters["drafts_ignored"] += self.book.answered(ask, answer.drafts, answer.unknown, seconds)
