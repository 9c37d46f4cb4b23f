"""A target that speaks OpenAI's API. Its HTTP client does no more than it must: it is not what is to be measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from shared.errors import InvalidField
from trine.bench_sets import Prompt
from trine.bench_sse import HttpError, StreamParser
from trine.bench_stats import Record

Extra = Callable[[int], Mapping[str, Any]]


class _Connection(asyncio.Protocol):
    """One answer at a time. `handle` gets the data of an event and when its bytes came."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.parser = StreamParser()
        self.handle: Callable[[bytes, float], None] = lambda data, at: None
        self.ended: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing() and self.parser.reusable

    async def exchange(self, request: bytes, handle: Callable[[bytes, float], None]) -> None:
        """Raises HttpError, or ConnectionError when it was closed before anything came."""
        self.parser, self.handle = StreamParser(), handle
        self.ended = asyncio.get_running_loop().create_future()
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError
        self.transport.write(request)
        await self.ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        try:
            for event in self.parser.feed(data):
                self.handle(event, now)
        except HttpError as error:
            self._end(error)
        else:
            if self.parser.done:
                self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self.parser.end()
        except HttpError as error:
            self._end(exc or error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self.ended is None or self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class HttpTarget:
    """`url` is that of the API, with or without /v1. Connections are kept and used again. An async context manager.

    `extra` says what else goes into the body of a request for so many tokens; what is None is left out. Raises
    InvalidField for a URL that is none.
    """

    def __init__(
        self, url: str, model: str, *, key: str = "", timeout: float = 600.0, extra: Extra = lambda most: {}
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidField(f"url: {url!r:.80} is not http://HOST:PORT", field="url")
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._path = f"{parts.path.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        self._netloc = parts.netloc.rpartition("@")[2]
        self._model, self._key, self._timeout, self._extra = model, key, timeout, extra
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> HttpTarget:
        return self

    async def __aexit__(self, *error: object) -> None:
        for connection in self._idle:
            connection.close()

    async def ask(self, prompt: Prompt, max_tokens: int, record: Record) -> None:
        body = {
            "model": self._model,
            "messages": prompt.messages,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra(max_tokens),
        }
        try:
            async with asyncio.timeout(self._timeout):
                await self._exchange(self._request(body), _Reader(record).take)
        except TimeoutError:
            record.error = "timeout"
        except HttpError as error:
            record.error = str(error)
        except OSError as error:
            record.error = type(error).__name__
        record.ended = time.monotonic()
        record.tokens = record.tokens or len(record.pieces)
        if not record.error and not record.pieces:
            record.error = "empty"

    async def _exchange(self, request: bytes, handle: Callable[[bytes, float], None]) -> None:
        """A kept connection may have been closed by the server meanwhile; then the request goes out on another one."""
        while True:
            kept = self._kept()
            connection = kept or await self._connect()
            try:
                await connection.exchange(request, handle)
                break
            except (HttpError, OSError):
                if kept is None or connection.parser.begun:
                    raise
            finally:
                if connection.usable and connection.parser.done:
                    self._idle.append(connection)
                else:
                    connection.close()

    def _kept(self) -> _Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).usable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        context = ssl.create_default_context() if self._secure else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=context)
        return connection

    def _request(self, body: dict[str, Any]) -> bytes:
        data = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        head = [
            f"POST {self._path} HTTP/1.1",
            f"host: {self._netloc}",
            "content-type: application/json",
            "accept: text/event-stream",
            f"content-length: {len(data)}",
            *([f"authorization: Bearer {self._key}"] if self._key else []),
        ]
        return "\r\n".join([*head, "", ""]).encode() + data


class _Reader:
    """Puts the events of one answer into its record."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def take(self, data: bytes, at: float) -> None:
        """Raises HttpError for an error in the stream, and for what is not JSON."""
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise HttpError("not JSON") from None
        if not isinstance(event, dict) or event.get("error"):
            raise HttpError("error event")
        if any(_texts(event)):
            self._record.pieces.append(at)
        if usage := event.get("usage"):
            self._record.tokens = usage.get("completion_tokens") or 0
            self._record.prompt_tokens = usage.get("prompt_tokens") or 0
            self._record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _texts(event: dict[str, Any]) -> Iterator[str]:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        yield delta.get("content") or delta.get("reasoning_content") or ""


async def first_model(url: str, key: str = "", timeout: float = 10.0) -> str:
    """The first model that the API at `url` lists. Raises InvalidField when it lists none, or does not answer."""
    import http.client
    import urllib.error
    import urllib.request

    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"

    def read() -> Any:
        request = urllib.request.Request(address)
        if key:
            request.add_unredirected_header("authorization", f"Bearer {key}")  # for nobody else
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    why = "it lists no model; name one with --model"
    with contextlib.suppress(LookupError, TypeError):
        try:
            return str((await asyncio.to_thread(read))["data"][0]["id"])
        except (urllib.error.URLError, OSError, ValueError, http.client.HTTPException) as error:
            why = str(getattr(error, "reason", error))
            if getattr(error, "code", 0) == 401:
                why = "it wants another key in OPENAI_API_KEY" if key else "it wants a key in OPENAI_API_KEY"
    raise InvalidField(f"url: no models at {address}: {why}", field="url")
