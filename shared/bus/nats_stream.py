"""Writing into streams and reading from them by subject."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nats.aio.msg import Msg

from shared.bus.base import Stored
from shared.bus.nats_api import Api, ApiError, parse_answer
from shared.bus.nats_client import status_of, user_headers
from shared.bus.nats_connection import NO_RESPONDERS, Connection, NoAnswer
from shared.bus.wire import check_message_id, largest_page
from shared.errors import (
    BusDisconnected,
    BusError,
    ConfigError,
    PermissionDenied,
    SequenceConflict,
    StreamFull,
    StreamMissing,
    TooLarge,
)

PAGE_SUBJECTS = 1000
"""The server answers a batch of more than 1,024 subjects with an error."""
PAGE_MESSAGES = 1000

END_OF_BATCH = 204
NOT_FOUND = 404

MESSAGE_TOO_LARGE = 10054
WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
STREAM_IS_FULL = frozenset({10023, 10077})
TOO_MANY_REQUESTS = 429


class Streams:
    """`max_pending` is the server's limit of the same name: bytes it will hold for a connection."""

    def __init__(self, connection: Connection, api: Api, max_pending: int) -> None:
        self._connection = connection
        self._api = api
        self._page_bytes = largest_page(max_pending)
        self._one_page = asyncio.Lock()  # on its way at a time: what `largest_page` rests on

    async def append(
        self,
        subject: str,
        data: bytes | Sequence[bytes | memoryview],
        headers: Mapping[str, str] | None,
        expect_last: int | None,
        message_id: str | None,
        timeout: float,
    ) -> int:
        payload = data if isinstance(data, bytes) else b"".join(data)
        self._connection.check_size(payload, headers)
        own = {} if expect_last is None else {"Nats-Expected-Last-Subject-Sequence": str(expect_last)}
        if message_id is not None:
            check_message_id(message_id)
            own["Nats-Msg-Id"] = message_id
        sent = {**(headers or {}), **own} or None
        deadline = _now() + timeout
        delay = 0.01
        while True:
            try:
                ack = parse_answer((await self._call(subject, payload, deadline, sent)).data)
            except ApiError as error:
                # The stream's ingest queue is full: nothing was stored, so try again a little later.
                if error.status != TOO_MANY_REQUESTS or _now() + delay > deadline:
                    raise append_error(subject, error) from None
                await asyncio.sleep(delay * random.uniform(0.5, 1.5))
                delay = min(2 * delay, 0.5)
                continue
            if ack.get("duplicate"):
                raise SequenceConflict(f"{subject}: message id {message_id} was stored before")
            if not isinstance(ack.get("seq"), int):
                raise BusError(f"{subject}: not an ack: {ack!s:.80}")
            seq: int = ack["seq"]
            return seq

    async def _call(self, subject: str, payload: bytes, deadline: float, headers: dict[str, str] | None) -> Msg:
        try:
            answer = await self._connection.call(subject, payload, deadline, headers)
        except NoAnswer:
            # A plain subscriber takes the message in silence where its stream is gone.
            await self._require_stream_of(subject)
            raise
        if status_of(answer) == NO_RESPONDERS:
            await self._require_stream_of(subject)
            raise BusDisconnected(f"the stream of {subject} does not answer")
        return answer

    async def _require_stream_of(self, subject: str) -> None:
        """Raises StreamMissing. Who may not ask hears only that there is no answer."""
        with contextlib.suppress(PermissionDenied):
            if await self._api.stream_of(subject) is None:
                raise StreamMissing(f"no stream captures {subject}")

    async def get_many(self, stream: str, subjects: Sequence[str], timeout: float) -> dict[str, Stored]:
        deadline = _now() + timeout
        found: dict[str, Stored] = {}
        missing = dict.fromkeys(subjects)
        while missing:
            page = self._page(missing)

            def take(message: Msg, page: dict[str, None] = page) -> None:
                stored = _stored(message)
                if stored.subject in page:
                    found[stored.subject] = stored

            ask = {"multi_last": list(page), "max_bytes": self._page_bytes}
            ended = await self._batch(stream, ask, take, deadline)
            # A batch may end before it is complete, with or without saying so. What did not come is asked for again;
            # only the answer that nothing matches makes a subject absent.
            for subject in page:
                if ended == NOT_FOUND or subject in found:
                    del missing[subject]
        return found

    def _page(self, subjects: dict[str, None]) -> dict[str, None]:
        """As many subjects as one request may name and carry."""
        page: dict[str, None] = {}
        room = self._connection.max_payload - 256
        for subject in subjects:
            room -= len(subject.encode()) + len('"", ')
            if page and (room < 0 or len(page) == PAGE_SUBJECTS):
                break
            page[subject] = None
        return page

    async def read(self, stream: str, subject: str, after: int, timeout: float, limit: int | None) -> list[Stored]:
        deadline = _now() + timeout
        messages: list[Stored] = []
        while limit is None or len(messages) < limit:
            last = messages[-1].seq if messages else after
            expected = 0  # each message names the one that the server sent before it in this batch

            def take(message: Msg) -> None:
                nonlocal expected
                stored = _stored(message)
                if _number(message, "Nats-Last-Sequence") == expected:  # else one was lost: read on from before it
                    messages.append(stored)
                    expected = stored.seq

            ask = {
                "seq": last + 1,
                "next_by_subj": subject,
                "batch": PAGE_MESSAGES if limit is None else min(PAGE_MESSAGES, limit - len(messages)),
                "max_bytes": self._page_bytes,
            }
            if await self._batch(stream, ask, take, deadline) == NOT_FOUND:
                break
        return messages

    async def _batch(self, stream: str, ask: dict[str, Any], take: Callable[[Msg], None], deadline: float) -> int:
        """Run one batched direct get and return how it ended: 204 or 404."""
        data = json.dumps(ask).encode()
        try:
            async with asyncio.timeout_at(deadline):
                await self._one_page.acquire()
        except TimeoutError:
            raise NoAnswer(f"stream {stream}: no turn to read in time") from None
        try:
            with self._connection.mailbox(f"$JS.API.DIRECT.GET.{stream}") as box:
                await self._connection.send(box.asks, data, None, box.subject)
                while (message := await box.next(deadline)) is not None:
                    status = status_of(message)
                    if status is None:
                        take(message)
                    elif status in (END_OF_BATCH, NOT_FOUND):
                        return status
                    else:
                        raise await self._batch_error(stream, status, message)
        finally:
            self._one_page.release()
        raise NoAnswer(f"stream {stream} did not answer in time")

    async def _batch_error(self, stream: str, status: int, message: Msg) -> BusError | ConfigError:
        if status != NO_RESPONDERS:
            return BusError(f"stream {stream}: {status} {(message.headers or {}).get('Description', '')}")
        info = await self._api.stream(stream)
        if not info.config.get("allow_direct"):
            return ConfigError(f"stream {stream}: allow_direct is off")
        return BusDisconnected(f"stream {stream} does not answer")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _number(message: Msg, header: str) -> int:
    value = (message.headers or {}).get(header, "")
    if not value.isdigit():
        raise BusError(f"a message without {header} in a batch")
    return int(value)


def _stored(message: Msg) -> Stored:
    subject = (message.headers or {}).get("Nats-Subject", "")
    return Stored(subject, _number(message, "Nats-Sequence"), message.data, user_headers(message), len(message.data))


def append_error(subject: str, error: ApiError) -> BusError | TooLarge:
    """What the refusal of a message means to who wanted it stored."""
    if error.number in WRONG_LAST_SEQUENCE:
        return SequenceConflict(f"{subject}: {error}")
    if error.number == MESSAGE_TOO_LARGE:
        return TooLarge(f"{subject}: {error}")
    if error.number in STREAM_IS_FULL or error.status == TOO_MANY_REQUESTS:
        return StreamFull(f"{subject}: {error}")
    return error
