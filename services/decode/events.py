"""A request's event stream: written by one attempt at a time, gapless, and readable by whoever continues it."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import structlog

from shared.bus.base import Bus
from shared.codec import Format, decode_event, encode
from shared.errors import BusError, RequestError, SequenceConflict
from shared.messages import Failed, Finished, Tokens
from shared.streams import REQUEST_HEADER
from shared.subjects import Subjects

SEED_HEADER = "Trine-Seed"  # the seed drawn by the first attempt, for those that continue it
RETRY_S = 0.3
GIVE_UP_S = 60.0

log = structlog.get_logger()


@dataclass(slots=True)
class History:
    """What a request's event subject holds already."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    last_seq: int = 0
    attempt: int = 0
    seed: int | None = None
    ended: bool = False
    foreign: bool = False
    """The last event belongs to another request with this id that has not ended."""


async def read_history(bus: Bus, subjects: Subjects, request_id: str, request: int) -> History:
    """Events stored for delivery `request` of `request_id`. Events of an earlier, ended request are passed over."""
    history = History()
    for stored in await bus.read(subjects.event_stream, subjects.events(request_id)):
        history.last_seq = stored.seq
        try:
            event = decode_event(stored.data)
        except RequestError:
            continue
        if stored.headers.get(REQUEST_HEADER) != str(request):
            history.foreign = isinstance(event, Tokens)
            continue
        history.foreign = False
        history.attempt = max(history.attempt, event.attempt)
        if isinstance(event, Tokens):
            _take(history, event)
            if (seed := stored.headers.get(SEED_HEADER, "")).lstrip("-").isdigit():
                history.seed = int(seed)
        else:
            history.ended = True
    return history


def _take(history: History, event: Tokens) -> None:
    new = event.index + len(event.token_ids) - len(history.tokens)
    if event.index > len(history.tokens) or new <= 0:
        return
    history.tokens += event.token_ids[-new:]
    history.texts += [""] * (new - 1) + [event.text]


class EventWriter:
    """Writes one attempt's events. Every append names the last sequence it expects on the subject: when another
    attempt has written meanwhile, the append fails and this writer stops (`run` returns False).
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        request_id: str,
        request: int,
        *,
        attempt: int,
        seed: int,
        format: Format,
        history: History,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._id = request_id
        self._request = request
        self._attempt = attempt
        self._seed = seed
        self._format = format
        self._last_seq = history.last_seq
        self._tokens = list(history.tokens)
        self._texts = list(history.texts)
        self._stored = len(self._tokens)
        self._end: Finished | Failed | None = None
        self._wake = anyio.Event()

    def push(self, token_id: int, text: str) -> None:
        """The next token, and the text it made visible."""
        self._tokens.append(token_id)
        self._texts.append(text)
        self._wake.set()

    def end(self, event: Finished | Failed) -> None:
        """The last event; the first one given counts."""
        self._end = self._end or event
        self._wake.set()

    async def run(self) -> bool:
        """Write until the terminal event is stored (True), or until fenced off or the bus stays away (False)."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            while self._stored < len(self._tokens):
                count = len(self._tokens)
                if not await self._append(self._tokens_event(count)):
                    return False
            if self._end is not None:
                return await self._append(self._end)

    def _tokens_event(self, count: int) -> Tokens:
        return Tokens(
            id=self._id,
            attempt=self._attempt,
            index=self._stored,
            token_ids=self._tokens[self._stored : count],
            text="".join(self._texts[self._stored : count]),
        )

    async def _append(self, event: Tokens | Finished | Failed) -> bool:
        """Store one event, whatever the bus does meanwhile. False when somebody else has taken over."""
        headers = {REQUEST_HEADER: str(self._request), SEED_HEADER: str(self._seed)}
        subject = self._subjects.events(self._id)
        with anyio.move_on_after(GIVE_UP_S):
            while True:
                try:
                    self._last_seq = await self._bus.append(
                        subject, encode(event, self._format), headers=headers, expect_last=self._last_seq, timeout=2.0
                    )
                    if isinstance(event, Tokens):
                        self._stored = event.index + len(event.token_ids)
                    return True
                except SequenceConflict:
                    history = await self._reconcile()
                    if history is None:
                        return False
                    if isinstance(event, Tokens) or history.ended:
                        return True  # `run` goes on from what is stored
                    if self._stored < len(self._tokens) and not await self._append(
                        self._tokens_event(len(self._tokens))
                    ):
                        return False
                except BusError as error:
                    log.debug("event not stored yet", request=self._id, error=str(error))
                    await anyio.sleep(RETRY_S)
        return False

    async def _reconcile(self) -> History | None:
        """After a conflict: what is stored decides. Our own event whose ack was lost, an emptied stream after a
        server restart (everything is written again; clients merge by index), or another attempt (None)."""
        while True:
            try:
                history = await read_history(self._bus, self._subjects, self._id, self._request)
                break
            except BusError:
                await anyio.sleep(RETRY_S)
        if history.attempt > self._attempt or history.foreign:
            log.info("fenced off", request=self._id, attempt=self._attempt, by=history.attempt)
            return None
        self._last_seq = history.last_seq
        self._stored = len(history.tokens)
        return history
