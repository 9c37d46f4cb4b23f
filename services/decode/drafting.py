"""Asks drafters for the next tokens of the running sequences, and waits for them no longer than they can save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import anyio
import structlog

from services.decode.drafters import Ask
from services.decode.request import Request
from services.decode.speculation import DraftBook
from shared.bus.base import Bus
from shared.codec import decode, encode
from shared.errors import BusError, RequestError, TooLarge
from shared.messages import DraftAsk, Drafts
from shared.peers import Peers
from shared.subjects import Subjects
from shared.telemetry import Counters

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
        book: DraftBook,
        worker: str,
        bus: Bus,
        subjects: Subjects,
        peers: Peers,
        counters: Counters,
        spawn: Callable[..., None],
    ) -> None:
        self.book = book
        self._worker = worker
        self._bus = bus
        self._subjects = subjects
        self._peers = peers
        self._counters = counters
        self._spawn = spawn

    async def ask(self, requests: Mapping[str, Request]) -> None:
        """Fill in `drafts` of the generating sequences among `requests` (by request id)."""
        generating = [r.sequence for r in requests.values() if r.sequence.generating]
        drafters = [b.worker for b in self._peers.alive("drafter", time.monotonic())]
        asks, wait_s = self.book.plan(generating, drafters)
        if asks:
            await self._await(asks, wait_s)
        for probe in self.book.probes(r.sequence for r in requests.values() if r.sequence.generating):
            self._counters["draft_probes"] += 1
            self._spawn(self._ask, probe, BESIDE_S)
        for sequence, source in self.book.settle(r.sequence for r in requests.values() if r.sequence.generating):
            requests[sequence.id].drafted_by.add(source)

    async def _await(self, asks: list[Ask], wait_s: float) -> None:
        answered = [anyio.Event() for _ in asks]
        for ask, event in zip(asks, answered, strict=True):
            self._spawn(self._ask, ask, wait_s, event.set)
        with anyio.move_on_after(wait_s):
            for event in answered:
                await event.wait()
        for ask, event in zip(asks, answered, strict=True):
            if not event.is_set():
                self._counters["draft_misses"] += 1
                self.book.missed(ask)

    async def _ask(self, ask: Ask, wait_s: float, done: Callable[[], None] = lambda: None) -> None:
        """One ask and whatever comes of it, in time or later."""
        started = time.perf_counter()
        message = DraftAsk(
            worker=self._worker,
            wait_ms=min(max(wait_s * 1e3, 0.1), 60_000.0),
            items=ask.items,
            ended=self.book.take_ended(ask.drafter),
        )
        try:
            reply = await self._bus.request(
                self._subjects.draft(ask.drafter), encode(message), timeout=max(ANSWER_S, 2 * wait_s)
            )
            answer = decode(reply.data, Drafts)
        except (BusError, TooLarge):
            self._counters["drafts_lost"] += 1
            self.book.lost(ask)
        except RequestError as error:
            self._counters["bad_drafts"] += 1
            log.warning("bad drafts ignored", drafter=ask.drafter, error=str(error))
            self.book.lost(ask)
        else:
            seconds = time.perf_counter() - started
            self._counters["drafts_ignored"] += self.book.answered(ask, answer.drafts, answer.unknown, seconds)
        finally:
            done()
