"""A request's event stream: written by one attempt at a time, gapless, and readable by whoever continues it."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum

import anyio
import structlog

from shared.bus.base import Bus
from shared.codec import Format, decode_event, encode
from shared.errors import BusError, RequestError, SequenceConflict, TooLarge
from shared.messages import Failed, Finished, Tokens
from shared.sampling.fields import Logprob
from shared.streams import REQUEST_HEADER

CACHED_HEADER = "Trine-Cached"  # cached prompt tokens that the first attempt found, for those that continue it
MAX_EVENT_TOKENS = 2048  # so that an event never outgrows what a message may have
MAX_EVENT_LOGPROBS = 256
RETRY_S = 0.3
GIVE_UP_S = 60.0

log = structlog.get_logger()


@dataclass(slots=True)
class History:
    """What a request's event subject holds already."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Logprob | None] = field(default_factory=list)
    """None for tokens that came without."""
    last_seq: int = 0
    attempt: int = 0
    wrote: int = 0
    """The last attempt that stored a token, 0 if none did."""
    cached_tokens: int | None = None
    """What the first attempt found in the caches."""
    tail: bool = False
    """Text that was held back has been shown: the end comes next."""
    ended: bool = False
    foreign: bool = False
    """The subject belongs to another request with this id: it wrote tokens first and has not ended."""


async def read_history(bus: Bus, stream: str, subject: str, request: int) -> History:
    """Events on `subject` for the request with sequence `request`. Those of an earlier, ended one are passed over."""
    history = History()
    mine, owner = str(request), None
    for stored in await bus.read(stream, subject):
        history.last_seq = stored.seq
        try:
            event = decode_event(stored.data)
        except RequestError:
            continue
        writer = stored.headers.get(REQUEST_HEADER, "")
        if isinstance(event, Tokens):
            owner = owner or writer
        elif writer == owner:
            owner = None
        if writer != mine:
            continue
        history.attempt = max(history.attempt, event.attempt)
        if isinstance(event, Tokens):
            _take(history, event)
            if history.cached_tokens is None and re.fullmatch("[0-9]{1,9}", stored.headers.get(CACHED_HEADER, "")):
                history.cached_tokens = int(stored.headers[CACHED_HEADER])
        else:
            history.ended = True
    history.foreign = owner not in (None, mine)
    return history


def _take(history: History, event: Tokens) -> None:
    history.tail |= not event.token_ids
    new = event.index + len(event.token_ids) - len(history.tokens)
    if event.index > len(history.tokens) or new <= 0:
        return
    history.wrote = max(history.wrote, event.attempt)
    history.tokens += event.token_ids[-new:]
    history.texts += [""] * (new - 1) + [event.text]
    history.logprobs += event.logprobs[-new:] if event.logprobs else [None] * new


class Outcome(Enum):
    """How an attempt's writing ended."""

    ENDED = "the last event is stored, by whomever"
    FENCED = "a later attempt has taken over"
    DUPLICATE = "the subject belongs to another request with the same id"
    GIVEN_UP = "the bus stayed away"


class EventWriter:
    """Writes one attempt's events. Every append names the last sequence it expects on the subject; when something
    else was written meanwhile, the append fails, and what is stored decides how to go on.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        subject: str,
        request_id: str,
        request: int,
        *,
        attempt: int,
        format: Format,
        history: History,
        ensure_streams: Callable[[], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._subject = subject
        self._id = request_id
        self._request = request
        self._attempt = attempt
        self._format = format
        self._ensure_streams = ensure_streams
        self._last_seq = history.last_seq
        self._tokens = list(history.tokens)
        self._texts = list(history.texts)
        self._logprobs = list(history.logprobs)
        self._stored = len(self._tokens)
        self._tail = ""
        self._tail_stored = history.tail
        self._end: Finished | Failed | None = None
        self._outcome: Outcome | None = None
        self._trouble_since: float | None = None
        self._most = MAX_EVENT_TOKENS
        self._wake = anyio.Event()
        self.cached_tokens = 0

    def push(self, token_id: int, text: str, logprob: Logprob | None = None) -> None:
        """The next token, and the text it made visible."""
        self._tokens.append(token_id)
        self._texts.append(text)
        self._logprobs.append(logprob)
        self._wake.set()

    def end(self, event: Finished | Failed, tail: str = "") -> None:
        """The last event, after text that was held back until now; the first call counts."""
        if self._end is None:
            self._end, self._tail = event, tail
        self._wake.set()

    async def run(self) -> Outcome:
        """Write until there is nothing more to write."""
        while self._outcome is None:
            if (event := self._next()) is None:
                await self._wake.wait()
                self._wake = anyio.Event()
            else:
                await self._store(event)
        return self._outcome

    def _next(self) -> Tokens | Finished | Failed | None:
        if self._stored < len(self._tokens):
            most = min(MAX_EVENT_TOKENS if self._logprobs[self._stored] is None else MAX_EVENT_LOGPROBS, self._most)
            part = slice(self._stored, self._stored + most)
            logprobs = [p for p in self._logprobs[part] if p is not None]
            return self._tokens_event(self._tokens[part], "".join(self._texts[part]), logprobs)
        return self._tokens_event([], self._tail) if self._tail and not self._tail_stored else self._end

    def _tokens_event(self, token_ids: list[int], text: str, logprobs: list[Logprob] | None = None) -> Tokens:
        """`logprobs` are left out unless there is one for each token."""
        return Tokens(
            id=self._id,
            attempt=self._attempt,
            index=self._stored,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs if logprobs and len(logprobs) == len(token_ids) else None,
        )

    async def _store(self, event: Tokens | Finished | Failed) -> None:
        """One try; on failure `run` comes back with what is then next."""
        headers = {REQUEST_HEADER: str(self._request), CACHED_HEADER: str(self.cached_tokens)}
        data = encode(event, self._format)
        try:
            self._last_seq = await self._bus.append(
                self._subject, data, headers=headers, expect_last=self._last_seq, timeout=2.0
            )
        except SequenceConflict:
            await self._reconcile()
        except TooLarge:  # this server takes less
            if not isinstance(event, Tokens) or len(event.token_ids) <= 1:
                raise
            self._most = len(event.token_ids) // 2
        except BusError as error:
            await self._pause(error)
        else:
            self._trouble_since = None
            if not isinstance(event, Tokens):
                self._outcome = Outcome.ENDED
            elif event.token_ids:
                self._stored = event.index + len(event.token_ids)
            else:
                self._tail_stored = True

    async def _reconcile(self) -> None:
        """Our own event whose ack was lost; an emptied stream after a server restart, when all is written again and
        clients merge by index; an older attempt's last words; or somebody to whom the subject belongs now."""
        try:
            history = await read_history(self._bus, self._stream, self._subject, self._request)
        except BusError as error:
            await self._pause(error)
            return
        self._last_seq = history.last_seq
        self._stored = len(history.tokens)
        self._tail_stored = history.tail
        if history.ended:
            self._outcome = Outcome.ENDED
        elif history.attempt > self._attempt:
            self._outcome = Outcome.FENCED
        elif history.foreign:
            self._outcome = Outcome.DUPLICATE

    async def _pause(self, error: BusError) -> None:
        now = time.monotonic()
        self._trouble_since = self._trouble_since or now
        if now - self._trouble_since > GIVE_UP_S:
            self._outcome = Outcome.GIVEN_UP
            return
        log.debug("event not stored yet", request=self._id, error=str(error))
        await anyio.sleep(RETRY_S)
        if error.code == "stream_missing":
            await self._ensure_streams()
