"""The drafter: answers asks for draft tokens. It can slow nobody down: late drafts are not awaited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import anyio

from services.drafter.config import DrafterSettings
from services.drafter.scheduler import SourceScore, record_outcome
from services.drafter.sessions import MAX_TOKENS, Session, SessionTable
from services.drafter.sources.base import DraftSource, SlowSource, Wish
from shared.actor import Actor
from shared.bus.base import Bus, Incoming
from shared.codec import decode, encode
from shared.errors import RequestError, TrineError
from shared.messages import Draft, DraftAsk, DraftItem, Drafts, Load

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
        self._unread: dict[Session, Wish] = {}  # by session, prompts too long to be answered in time
        self._ended: list[Session] = []
        self._arrived = anyio.Event()
        self._busy = False

    def vocabulary(self) -> str:
        return self._vocabulary

    def load(self) -> Load:
        return Load(running=int(self._busy), waiting=len(self._pending))

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
        named = Counter(i.session for i in asked.items)
        ask.unknown = [name for name, times in named.items() if times > 1]  # which of them to believe?
        told = [(i, self._update(asked.worker, i)) for i in asked.items if named[i.session] == 1]
        self._end(self._sessions.overflow())
        for item, session in told:
            if session is None or session.ended:
                ask.unknown.append(item.session)
                continue
            record_outcome(session, self._scores)
            tokens = session.tokens
            ask.open.append(Wish(session, tokens, len(tokens), item.k, item.sampling, asked.wait_ms / 1e3))
        return ask

    def _update(self, worker: str, item: DraftItem) -> Session | None:
        """The session as it is told now; a session told what cannot be is dropped."""
        key = (worker, item.session)
        length = item.base + len(item.token_ids)
        if 0 < length <= MAX_TOKENS and max(item.token_ids, default=0) < self._vocab_size:
            return self._sessions.update(key, item.base, item.token_ids)
        if (session := self._sessions.end(key)) is not None:
            self._end([session])
        return None

    def _use(self, ask: _Ask, source: str, found: Sequence[list[int]]) -> None:
        left = []
        for wish, tokens in zip(ask.open, found, strict=True):
            if not tokens:
                left.append(wish)
                continue
            wish.session.guessed = (wish.length, tuple(tokens), source)
            self.counters[f"drafted_{source}"] += len(tokens)
            ask.drafts.append(Draft(session=wish.session.key[1], position=wish.length, token_ids=tokens, source=source))
        ask.open = left

    def _leave_to_slow(self, ask: _Ask) -> bool:
        """Whether the slow source will answer this ask."""
        slow = self._slow
        if slow is None or not ask.open or len(self._pending) >= MAX_PENDING:
            return False
        if self._adaptive:
            if self._busy or not self._scores[slow.name].worth_trying():
                return False
            late = {w.session: w for w in ask.open if slow.expected_s(w) > w.budget_s}
            self._unread.update(late)  # read meanwhile, to be in time later
            ask.open = [w for w in ask.open if w.session not in late]
        self._arrived.set()
        if ask.open:
            self._pending.append(ask)
        return bool(ask.open)

    async def _send(self, ask: _Ask) -> None:
        if not ask.reply:
            return
        try:
            answer = Drafts(worker=self.worker, drafts=ask.drafts, unknown=ask.unknown)
            await self.bus.publish(ask.reply, encode(answer))
        except TrineError as error:
            self.counters["answers_unsent"] += 1
            self.log.debug("answer not sent", error=str(error))

    # The slow source

    async def _slow_drafts(self) -> None:
        if self._slow is None:
            await anyio.sleep_forever()
            return
        while True:
            await self._arrived.wait()
            self._arrived = anyio.Event()
            self._busy = True
            await self._answer(self._slow)
            await self._read_ahead(self._slow)
            self._busy = False

    async def _answer(self, slow: SlowSource) -> None:
        """Of a session asked about again only the newest wish counts: the asker waits no longer for the others."""
        asks, self._pending = self._pending, []
        newest = {w.session: w for a in asks for w in a.open}
        found = await self._draft(slow, list(newest.values()))
        for ask in asks:
            self._use(ask, slow.name, [found.get(w, []) for w in ask.open])
            await self._send(ask)

    async def _read_ahead(self, slow: SlowSource) -> None:
        """A piece of one unread prompt; then it is the turn of whoever can be answered in time."""
        if self._unread:
            await self._draft(slow, [self._unread.pop(next(iter(self._unread)))])

    async def _draft(self, slow: SlowSource, wishes: Sequence[Wish]) -> dict[Wish, list[int]]:
        """What the slow source finds; nothing if it fails, which must not cost the instant sources."""
        ended, self._ended = self._ended, []
        alive = [w for w in wishes if not w.session.ended]
        try:
            found = await self.in_engine(_run, slow, alive, ended)
            return dict(zip(alive, found, strict=True))
        except Exception:
            self.counters["draft_errors"] += 1
            self.log.exception("no drafts: the source failed", source=slow.name)
            return {}

    def _end(self, sessions: Iterable[Session]) -> None:
        """Instant sources forget at once; the slow one when it is next called, in its own thread."""
        for session in sessions:
            self._unread.pop(session, None)
            for source in self._instant:
                source.end(session)
            if self._slow is not None:
                self._ended.append(session)
                self._arrived.set()


def _run(source: SlowSource, wishes: Sequence[Wish], ended: Sequence[Session]) -> list[list[int]]:
    """After an error nothing that the source holds of these sessions is relied on."""
    for session in ended:
        source.end(session)
    try:
        return source.draft(wishes)
    except Exception:
        for wish in wishes:
            source.end(wish.session)
        raise
