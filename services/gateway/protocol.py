"""uvicorn's HTTP protocol with bounds: on headers, on how long a client may take, and on how many connect."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.gateway.config import GatewaySettings
from services.gateway.problems import Problem


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds, bytes, counts. See the settings of the same names."""

    headers: int
    header_bytes: int
    connections: int
    read_s: float
    write_s: float

    @classmethod
    def of(cls, settings: GatewaySettings) -> Bounds:
        return cls(
            headers=settings.max_headers,
            header_bytes=settings.max_header_bytes,
            connections=settings.max_connections,
            read_s=settings.read_s,
            write_s=settings.write_s,
        )


class BoundedProtocol(HttpToolsProtocol):
    """A client that is slow with its headers, or does not take what is sent, is cut off."""

    bounds: ClassVar[Bounds]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._count = self._bytes = self._fed = 0
        self._refusal: Problem | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            transport.abort()
            return
        self._reading = self.loop.call_later(self.bounds.read_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_reading()
        self._unset_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        continued = self._in_head
        super().data_received(data)
        if continued and self._in_head and not self.transport.is_closing():
            self._fed += len(data)  # a header that has not ended yet has not been counted
            if self._fed > self.bounds.header_bytes:
                self._refusal = _TOO_LARGE
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._count = self._bytes = self._fed = 0
        if self._reading is None:
            self._reading = self.loop.call_later(self.bounds.read_s, self.transport.abort)

    def on_url(self, url: bytes) -> None:
        self._measure(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count += 1
        self._measure(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._unset_reading()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """In the shape of all other errors."""
        problem = self._refusal or Problem(400, "this is not HTTP", "bad_request")
        body = json.dumps(problem.body).encode()
        lines = [
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"connection: close\r\n\r\n",
        ]
        self.transport.write(b"".join([STATUS_LINE[problem.status], *lines, body]))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unset_writing()
        self._writing = self.loop.call_later(self.bounds.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._unset_writing()
        super().resume_writing()

    def _measure(self, size: int) -> None:
        """Raises a Problem; the parser then stops, and calls what answers bad requests."""
        self._bytes += size
        if self._bytes > self.bounds.header_bytes or self._count > self.bounds.headers:
            self._refusal = _TOO_LARGE
            raise _TOO_LARGE

    def _unset_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _unset_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None


_TOO_LARGE = Problem(431, "the request's headers are too many or too large", "headers_too_large")


def bounded(bounds: Bounds) -> type[BoundedProtocol]:
    """uvicorn makes protocols itself, and tells them nothing of ours."""
    return type("BoundedProtocol", (BoundedProtocol,), {"bounds": bounds})
