"""Asks drafters for the next tokens of the running sequences, and waits for them no longer than configured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import anyio
import structlog

from services.decode.request import Request
from services.decode.speculation import DraftBook
from shared.bus.base import Bus
from shared.codec import decode, encode
from shared.errors import BusError, RequestError, TooLarge
from shared.messages import DraftAsk, DraftItem, Drafts
from shared.peers import Peers
from shared.subjects import Subjects
from shared.telemetry import Counters

log = structlog.get_logger()


class Drafting:
    """The shell around a `DraftBook`. A drafter that is absent, slow, wrong or dead costs speed, never an answer."""

    def __init__(
        self,
        book: DraftBook,
        worker: str,
        wait_s: float,
        bus: Bus,
        subjects: Subjects,
        peers: Peers,
        counters: Counters,
    ) -> None:
        self.book = book
        self._worker = worker
        self._wait = wait_s
        self._bus = bus
        self._subjects = subjects
        self._peers = peers
        self._counters = counters

    async def ask(self, requests: Mapping[str, Request]) -> None:
        """Fill in `drafts` of the generating sequences among `requests` (by request id) that are answered in time."""
        self.book.next_step()
        generating = [r.sequence for r in requests.values() if r.sequence.generating]
        drafters = [b.worker for b in self._peers.alive("drafter", time.monotonic())] if generating else []
        asks = self.book.asks(generating, drafters)
        if not asks:
            return
        async with anyio.create_task_group() as group:
            for drafter, items in asks.items():
                group.start_soon(self._ask_one, drafter, items, requests)

    async def _ask_one(self, drafter: str, items: Seq[DraftItem], requests: Mapping[str, Request]) -> None:
        ask = DraftAsk(
            worker=self._worker,
            wait_ms=max(self._wait * 1e3, 0.1),
            items=list(items),
            ended=self.book.take_ended(drafter),
        )
        sessions = [i.session for i in items]
        try:
            reply = await self._bus.request(self._subjects.draft(drafter), encode(ask), timeout=self._wait)
        except (BusError, TooLarge):
            self._counters["draft_misses"] += 1
            self.book.missed(drafter, sessions)
            return
        try:
            answer = decode(reply.data, Drafts)
        except RequestError as error:
            self._counters["bad_drafts"] += 1
            log.warning("bad drafts ignored", drafter=drafter, error=str(error))
            self.book.missed(drafter, sessions)
            return
        self.book.answered(drafter)
        self._take(drafter, answer, set(sessions), requests)

    def _take(self, drafter: str, answer: Drafts, asked: set[str], requests: Mapping[str, Request]) -> None:
        self.book.unknown(asked.intersection(answer.unknown))
        for draft in answer.drafts:
            request = requests.get(draft.session)
            if request is None or draft.session not in asked or not self.book.take(request.sequence, draft):
                self._counters["drafts_ignored"] += 1
            elif draft.token_ids:
                request.drafted_by.add(f"{drafter}:{draft.source}")
