"""`BlockLink` on a connection to NATS of its own: JetStream's publishes and batched gets over a `BulkLink`."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from shared.bus import bulk_wire
from shared.bus.block_link import WINDOW_COUNT, Item, Receive
from shared.bus.bulk_link import BulkLink, Message
from shared.bus.bulk_wire import parse_servers
from shared.bus.login import NOBODY, Login
from shared.bus.nats_api import ApiError, parse_answer
from shared.bus.nats_connection import NO_RESPONDERS, SLACK
from shared.bus.nats_stream import END_OF_BATCH, NOT_FOUND, PAGE_SUBJECTS, TOO_MANY_REQUESTS, append_error
from shared.bus.wire import DEFAULT_MAX_PENDING, largest_page
from shared.errors import BusDisconnected, BusError, ConfigError, FrameError, StreamMissing, TooLarge, TrineError

WINDOW_BYTES = 32 << 20
PAGE_BYTES = 8 << 20
"""Of one batched get; larger ones were measured no faster, and the server holds them in memory."""
MAX_ANSWER = 16 << 10
MAX_IDLE_PAGES = 3
MAX_DIGITS = 20
"""Of a sequence, which has 64 bits."""


class StreamLink:
    """`BlockLink` on a connection of its own to `url` (as for `NatsBus`).

    Connects when first used, and again when it must. `max_pending` must not be more than the server's. Raises
    ConfigError when `url` is no address.
    """

    def __init__(self, url: str, name: str, *, login: Login = NOBODY, max_pending: int = DEFAULT_MAX_PENDING) -> None:
        login = login.at(url)
        self._link = BulkLink(
            parse_servers(url, login.user, login.password), name, login.tls, login.inbox, login.signer
        )
        # Never used twice: an answer that comes late, after its operation timed out, is nobody's.
        self._tokens = map(str, itertools.count(1))
        self._page_bytes = min(PAGE_BYTES, largest_page(max_pending))

    def put(self, items: Sequence[Item], deadline: float) -> list[int | TrineError]:
        puts = _Puts(self._link, self._tokens, items, deadline)
        failure: TrineError = BusDisconnected("no answer")
        try:
            with self._link.operation(deadline):
                self._run(puts)
        except (BusError, ConfigError) as error:
            failure = error.with_traceback(None)  # which would keep the caller's memory in use
        return puts.results(failure)

    def get(self, stream: str, subjects: Sequence[str], receive: Receive, deadline: float) -> None:
        gets = _Gets(self._link, self._tokens, stream, subjects, receive, self._page_bytes)
        with self._link.operation(deadline):
            self._run(gets)

    def close(self) -> None:
        self._link.close()

    def _run(self, work: _Puts | _Gets) -> None:
        """A connection from before may prove dead only now. Where nothing came of it yet, once more on a new one: a
        get changes nothing, and a put that was stored the first time finds a conflict.
        """
        new = self._link.connect()
        try:
            work.run()
        except BusDisconnected:
            if new or work.heard:
                raise
            self._link.connect()
            work.run()


class _Puts:
    """Sends in a window of acks.

    While it sends it does not read. Neither side can block the other for that: at most WINDOW_COUNT answers of a few
    hundred bytes are unread then, for which the sockets' buffers alone have room, so the server need not stop reading.
    If it does, the deadline ends it.
    """

    def __init__(self, link: BulkLink, tokens: Iterator[str], items: Sequence[Item], deadline: float) -> None:
        self.heard = False
        self._link = link
        self._tokens = tokens
        self._items = items
        self._deadline = deadline
        self._results: dict[int, int | TrineError] = {}
        self._waiting = deque(range(len(items)))
        self._sent: dict[str, int] = {}
        self._bytes = 0  # in flight
        self._not_before = 0.0
        self._delay = 0.01

    def results(self, otherwise: TrineError) -> list[int | TrineError]:
        return [self._results.get(index, otherwise) for index in range(len(self._items))]

    def run(self) -> None:
        self._waiting.extendleft(reversed(self._sent.values()))
        self._sent.clear()
        self._bytes = 0
        while self._waiting or self._sent:
            if self._may_send():
                self._send(self._waiting.popleft())
            elif self._sent:
                self._link.receive(self._on_message)
            else:
                time.sleep(max(0.0, self._not_before - time.monotonic()))

    def _may_send(self) -> bool:
        if not self._waiting or time.monotonic() < self._not_before:
            return False
        if not self._sent:
            return True
        return len(self._sent) < WINDOW_COUNT and self._bytes + self._items[self._waiting[0]].size <= WINDOW_BYTES

    def _send(self, index: int) -> None:
        item, token = self._items[index], next(self._tokens)
        size, room = item.size, self._link.max_payload - SLACK
        headers = {"Nats-Expected-Last-Subject-Sequence": str(item.expect_last)}
        try:
            if size > room:
                raise TooLarge(f"{size} bytes; the bus takes at most {room}")
            head = bulk_wire.publish(item.subject, f"{self._link.inbox}.{token}", headers, size)
        except (BusError, TooLarge) as error:
            self._results[index] = error.with_traceback(None)
            return
        self._sent[token] = index
        self._bytes += size
        self._link.send([head, *item.parts, b"\r\n"])

    def _on_message(self, message: Message) -> None:
        index = self._sent.pop(message.subject.removeprefix(f"{self._link.inbox}."), None)
        if index is None:
            return
        self.heard = True
        item = self._items[index]
        self._bytes -= item.size
        try:
            self._results[index] = _sequence(item.subject, message)
        except ApiError as error:
            # The stream's ingest queue is full: nothing was stored, so try again a little later.
            if error.status == TOO_MANY_REQUESTS and time.monotonic() + self._delay < self._deadline:
                self._waiting.append(index)
                self._pause()
            else:
                self._results[index] = append_error(item.subject, error)
        except BusError as error:
            self._results[index] = error.with_traceback(None)

    def _pause(self) -> None:
        if time.monotonic() >= self._not_before:  # else this one was sent before the last pause began
            self._not_before = time.monotonic() + self._delay * random.uniform(0.5, 1.0)
            self._delay = min(2 * self._delay, 0.5)


def _sequence(subject: str, message: Message) -> int:
    """The sequence in an ack. Raises StreamMissing, ApiError, BusError."""
    if message.status == NO_RESPONDERS and not message.reader.left:
        raise StreamMissing(f"no stream captures {subject}")
    if message.reader.left > MAX_ANSWER:
        raise BusError(f"{subject}: an answer of {message.reader.left} bytes is no ack")
    sequence = parse_answer(message.reader.exactly(message.reader.left)).get("seq")
    if type(sequence) is not int or sequence <= 0:
        raise BusError(f"{subject}: an answer that is no ack")
    return sequence


class _Gets:
    """Batched direct gets, page after page; what a page did not bring is asked for again."""

    def __init__(
        self,
        link: BulkLink,
        tokens: Iterator[str],
        stream: str,
        subjects: Sequence[str],
        receive: Receive,
        page_bytes: int,
    ) -> None:
        self.heard = False
        self._link = link
        self._tokens = tokens
        self._stream = stream
        self._missing = dict.fromkeys(subjects)
        self._receive = receive
        self._page_bytes = page_bytes
        self._reply = ""
        self._ended: int | None = None

    def run(self) -> None:
        idle = 0
        while self._missing:
            before = len(self._missing)
            page = self._page()
            # A batch may end before it is complete, with or without saying so. Only the answer that nothing matches
            # makes a subject absent.
            if self._batch(page) == NOT_FOUND:
                for subject in page:
                    self._missing.pop(subject, None)
            idle = idle + 1 if len(self._missing) == before else 0
            if idle == MAX_IDLE_PAGES:
                raise BusError(f"stream {self._stream}: batches end without a message, again and again")

    def _page(self) -> list[str]:
        """As many subjects as one request may name and carry."""
        page: list[str] = []
        room = self._link.max_payload - SLACK
        for subject in itertools.islice(self._missing, PAGE_SUBJECTS):
            room -= len(json.dumps(subject)) + len(", ")
            if page and room < 0:
                break
            page.append(subject)
        return page

    def _batch(self, page: Sequence[str]) -> int:
        """One batched direct get: https://github.com/nats-io/nats-architecture-and-design/blob/main/adr/ADR-31.md.

        Returns how it ended: 204 or 404.
        """
        self._reply = f"{self._link.inbox}.{next(self._tokens)}"
        self._ended = None
        ask = json.dumps({"multi_last": page, "max_bytes": self._page_bytes}).encode()
        head = bulk_wire.publish(f"$JS.API.DIRECT.GET.{self._stream}", self._reply, {}, len(ask))
        self._link.send([head, ask, b"\r\n"])
        while self._ended is None:
            self._link.receive(self._on_message)
        if self._ended == NO_RESPONDERS:
            raise StreamMissing(f"stream {self._stream} does not exist, or it does not allow direct gets")
        if self._ended not in (END_OF_BATCH, NOT_FOUND):
            raise BusError(f"stream {self._stream}: status {self._ended}")
        return self._ended

    def _on_message(self, message: Message) -> None:
        if message.subject != self._reply:
            return
        self.heard = True
        sequence = message.headers.get("Nats-Sequence")
        subject = message.headers.get("Nats-Subject", "")
        if sequence is None:  # which every stored message has, whatever status its publisher wrote into it
            self._ended = self._ending(message)
        elif not (sequence.isascii() and sequence.isdigit() and len(sequence) <= MAX_DIGITS):
            raise BusError(f"stream {self._stream}: a message without a sequence in a batch")
        elif subject in self._missing:
            del self._missing[subject]
            with suppress(FrameError):
                self._receive(subject, int(sequence), message.reader.left, message.reader)

    def _ending(self, message: Message) -> int:
        if message.status is None:
            raise BusError(f"stream {self._stream}: a message without Nats-Sequence in a batch")
        return message.status
