"""The drafter: answers asks for draft tokens. It can slow nobody down: late drafts are not awaited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import anyio

from services.drafter.config import DrafterSettings
from services.drafter.scheduler import SourceScore, record_outcome
from services.drafter.sessions import Session, SessionTable
from services.drafter.sources.base import DraftSource, SlowSource, Wish
from shared.actor import Actor
from shared.bus.base import Bus, Incoming
from shared.codec import decode, encode
from shared.errors import BusError, RequestError
from shared.messages import Draft, DraftAsk, Drafts, Load

MAX_PENDING = 256


@dataclass(slots=True)
class _Ask:
    """One decode worker's ask on its way to an answer."""

    reply: str
    drafts: list[Draft] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    open: list[Wish] = field(default_factory=list)
    """Wishes that no instant source could answer."""


class DrafterWorker(Actor):
    """Instant sources answer when the ask arrives. What they leave open goes to the slow source, the asks of all
    decode workers in one batch. With `auto` nobody is kept waiting for a slow source that will be too late.
    """

    role = "drafter"

    def __init__(
        self,
        settings: DrafterSettings,
        bus: Bus,
        worker: str,
        *,
        instant: Sequence[DraftSource],
        slow: SlowSource | None,
        vocabulary: str,
        vocab_size: int,
    ) -> None:
        super().__init__(settings, bus, worker)
        self._instant = list(instant)
        self._slow = slow
        self._adaptive = settings.draft_source == "auto"
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._sessions = SessionTable(settings.max_sessions)
        self._scores = {s.name: SourceScore() for s in [*instant, *([slow] if slow else [])]}
        self._pending: list[_Ask] = []
        self._ended: list[Session] = []
        self._arrived = anyio.Event()
        self._busy = False

    def vocabulary(self) -> str:
        return self._vocabulary

    def load(self) -> Load:
        return Load(running=len(self._sessions), waiting=len(self._pending))

    async def setup(self) -> None:
        await self.bus.subscribe(self.subjects.draft(self.worker), self._on_ask)

    def side_tasks(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {"slow source": self._slow_drafts}

    async def drain(self) -> None:
        """Nothing to hand back: decode workers see the beat and ask elsewhere."""

    # Asks

    async def _on_ask(self, message: Incoming) -> None:
        try:
            asked = decode(message.data, DraftAsk)
        except RequestError as error:
            self.counters["bad_messages"] += 1
            self.log.warning("bad ask", error=error.message, field=error.field)
            return
        ask = self._take_in(asked, message.reply)
        for source in self._instant:
            self._use(ask, source.name, source.draft(ask.open))
        if not self._leave_to_slow(ask):
            await self._send(ask)

    def _take_in(self, asked: DraftAsk, reply: str) -> _Ask:
        """Bring the sessions up to date and list what is wanted."""
        ask = _Ask(reply)
        self._end(s for name in asked.ended if (s := self._sessions.end((asked.worker, name))))
        for item in asked.items:
            session = self._sessions.update((asked.worker, item.session), item.base, item.token_ids)
            if session is None or any(t >= self._vocab_size for t in item.token_ids):
                ask.unknown.append(item.session)
                continue
            record_outcome(session, self._scores)
            ask.open.append(Wish(session, tuple(session.tokens), item.k, item.sampling, asked.wait_ms / 1e3))
        self._end(self._sessions.overflow())
        return ask

    def _use(self, ask: _Ask, source: str, found: Sequence[list[int]]) -> None:
        left = []
        for wish, tokens in zip(ask.open, found, strict=True):
            if not tokens:
                left.append(wish)
                continue
            wish.session.guessed = (len(wish.tokens), tuple(tokens), source)
            self.counters[f"drafted_{source}"] += len(tokens)
            ask.drafts.append(
                Draft(session=wish.session.key[1], position=len(wish.tokens), token_ids=tokens, source=source)
            )
        ask.open = left

    def _leave_to_slow(self, ask: _Ask) -> bool:
        """Whether the slow source will answer this ask."""
        if self._slow is None or not ask.open or len(self._pending) >= MAX_PENDING:
            return False
        if not self._adaptive:
            self._enqueue(ask)
            return True
        if self._busy or not self._scores[self._slow.name].worth_trying():
            return False
        slow = self._slow
        if all(slow.expected_s(w) <= w.budget_s for w in ask.open):
            self._enqueue(ask)
            return True
        self._enqueue(_Ask("", open=ask.open))  # it reads the prompt meanwhile, to be in time later
        return False

    async def _send(self, ask: _Ask) -> None:
        if not ask.reply:
            return
        try:
            answer = Drafts(worker=self.worker, drafts=ask.drafts, unknown=ask.unknown)
            await self.bus.publish(ask.reply, encode(answer))
        except BusError:
            self.counters["answers_unsent"] += 1

    # The slow source

    def _enqueue(self, ask: _Ask) -> None:
        self._pending.append(ask)
        self._arrived.set()

    async def _slow_drafts(self) -> None:
        if self._slow is None:
            await anyio.sleep_forever()
            return
        while True:
            await self._arrived.wait()
            self._arrived = anyio.Event()
            asks, self._pending = self._pending, []
            ended, self._ended = self._ended, []
            wishes = [w for a in asks for w in a.open]
            self._busy = True
            found = await self.in_engine(_run, self._slow, wishes, ended)
            self._busy = False
            for ask in asks:
                count = len(ask.open)
                self._use(ask, self._slow.name, found[:count])
                del found[:count]
                await self._send(ask)

    def _end(self, sessions: Iterable[Session]) -> None:
        """Instant sources forget at once; the slow one when it is next called, in its own thread."""
        for session in sessions:
            for source in self._instant:
                source.end(session)
            if self._slow is not None:
                self._ended.append(session)


def _run(source: SlowSource, wishes: Sequence[Wish], ended: Sequence[Session]) -> list[list[int]]:
    for session in ended:
        source.end(session)
    return source.draft(wishes)
