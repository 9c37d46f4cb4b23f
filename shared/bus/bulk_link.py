"""A connection to NATS for bulk bytes: sent from where they lie, received where they shall be.

The client library copies a payload three times on each way; here the kernel takes it from the caller's memory and
puts it into the destination. Blocking, for a thread of its own. A link connects when it is first used and again after
every error: in the middle of a message nothing that follows can be understood.
"""

from __future__ import annotations

import contextlib
import random
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shared.bus import bulk_wire
from shared.bus.bulk_socket import BulkSocket
from shared.bus.bulk_wire import Delivery, Info, Server
from shared.bus.nkey import Signer
from shared.bus.wire import new_inbox
from shared.errors import BusDisconnected, BusError, ConfigError, FrameError, PermissionDenied

MAX_HEADERS = 16 << 10
"""Bytes of one message's headers."""
CONNECT_S = 3.0
IDLE_S = 10.0
"""A connection that was unused for so long is asked whether it is still there."""
PONG_S = 1.0
MAX_BACKOFF_S = 1.0
_MESSAGES = (b"MSG", b"HMSG")


class LinkReader:
    """The payload of one message while it arrives. What is not read of it is thrown away."""

    def __init__(self, connection: BulkSocket, size: int) -> None:
        self._connection = connection
        self.left = size

    def exactly(self, count: int) -> bytes:
        self._take(count)
        return self._connection.exactly(count)

    def into(self, place: memoryview) -> None:
        self._take(place.nbytes)
        self._connection.fill(place)

    def _take(self, count: int) -> None:
        if not 0 <= count <= self.left:
            raise FrameError(f"{count} bytes of a message that has {self.left} left")
        self.left -= count


@dataclass(frozen=True, slots=True)
class Message:
    """`status` is the code of a message that the server made itself."""

    subject: str
    status: int | None
    headers: dict[str, str]
    reader: LinkReader


Handle = Callable[[Message], None]


def _ignore(_: Message) -> None:
    """A late answer to an operation that has ended."""


class BulkLink:
    """`servers` are tried in turn; the one that worked stays. With `tls`, credentials never go out in the clear.
    `inbox`: where answers come, below it; when empty, in the inbox of the user. `signer` logs in where the servers'
    addresses name nobody.

    All but `close` is for one thread at a time, inside `operation`. Errors: BusDisconnected (lost, not there, out of
    time: whether what was sent arrived is unknown), BusError (what the server says is not NATS's protocol, or it
    refuses), PermissionDenied (it does not let us publish or subscribe there), ConfigError (it refuses our
    credentials). Each of them has ended the connection.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        name: str,
        tls: ssl.SSLContext | None = None,
        inbox: str = "",
        signer: Signer | None = None,
    ) -> None:
        self._servers = deque(servers)
        self._name = name
        self._tls = tls
        self._signer = signer
        self._socket: BulkSocket | None = None
        self._info = Info(0, False, False)
        self._deadline = 0.0
        self._used = 0.0
        self._failures = 0
        self._failure: BusError | ConfigError = BusDisconnected("no address of a NATS server")
        self._not_before = 0.0
        self._busy = threading.Lock()
        self._closed = False
        self.inbox = new_inbox(servers[0].login if servers else None, inbox)
        """Answers to `<inbox>.<token>` come here."""

    @property
    def max_payload(self) -> int:
        """The server's; known once connected."""
        return self._info.max_payload

    @contextlib.contextmanager
    def operation(self, deadline: float) -> Iterator[None]:
        """What is inside ends by `deadline` (of `time.monotonic`). Only the system's resolver, where a server is given
        by name, has a time-out of its own.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("a link is for one thread at a time")
        try:
            self._deadline = deadline
            if self._socket is not None:
                self._socket.deadline = deadline
            yield
            self._used = time.monotonic()
        finally:
            if self._closed:
                self._drop()
            self._busy.release()

    def close(self) -> None:
        """For good, from any thread: an operation that runs ends with BusDisconnected."""
        self._closed = True
        if (connection := self._socket) is not None:
            connection.interrupt()
        if self._busy.acquire(blocking=False):
            self._drop()
            self._busy.release()

    # Messages

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """All parts, in order."""
        with self._ending_on_error() as connection:
            connection.send(parts)

    def receive(self, handle: Handle) -> None:
        """Wait for one message and give it to `handle`, which may read its payload. Its errors end the connection."""
        with self._ending_on_error() as connection:
            while self._step(connection, handle) not in _MESSAGES:
                pass

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[BulkSocket]:
        connection = self._socket
        if connection is None or self._closed:
            raise BusDisconnected("the bulk connection is closed")
        try:
            yield connection
        except BaseException:
            self._drop()
            raise

    def _step(self, connection: BulkSocket, handle: Handle) -> bytes:
        """Take one line and what belongs to it; returns its verb."""
        line = connection.line()
        verb = line.split(None, 1)[0].upper() if line.strip() else b""
        if verb in _MESSAGES:
            self._deliver(connection, bulk_wire.parse_delivery(line), handle)
        elif verb == b"PING":
            connection.send([b"PONG\r\n"])
        elif verb == b"INFO":
            self._info = bulk_wire.parse_info(line)
        elif verb == b"-ERR":
            raise self._refusal(line)
        elif verb not in (b"PONG", b"+OK"):
            raise BusError("what the server says is not NATS's protocol")
        return verb

    def _deliver(self, connection: BulkSocket, line: Delivery, handle: Handle) -> None:
        # Refused before a byte is reserved. A payload needs no memory of ours: `handle` brings the room for it.
        if line.headers > MAX_HEADERS or line.payload > self._info.max_payload:
            raise BusError(f"a message of {line.headers} + {line.payload} bytes is more than the server itself allows")
        status: int | None = None
        headers: dict[str, str] = {}
        if line.headers:
            status, headers = bulk_wire.parse_headers(connection.exactly(line.headers))
        reader = LinkReader(connection, line.payload)
        handle(Message(line.subject, status, headers, reader))
        left, reader.left = reader.left, 0
        connection.skip(left)
        if connection.exactly(2) != b"\r\n":
            raise BusError("a message that does not end where it should")

    def _refusal(self, line: bytes) -> BusError | ConfigError:
        server = self._servers[0]
        if b"authorization violation" in line.lower():
            return ConfigError(f"NATS at {server.label} refuses our credentials")
        error = f"NATS at {server.label}: {server.quoted(line.removeprefix(b'-ERR').strip())}"
        if b"permissions violation" in line.lower():
            return PermissionDenied(error)
        passing = any(word in line.lower() for word in (b"stale connection", b"timeout", b"shutdown"))
        return BusDisconnected(error) if passing else BusError(error)

    # Connecting

    def connect(self) -> bool:
        """Be connected; returns whether the connection is new. Once no server was there, none is asked for a moment
        (at most 1.5 s), so that who calls again and again does not spin.
        """
        if self._closed:
            raise BusDisconnected("the bulk connection is closed")
        if time.monotonic() >= self._deadline:  # which is no reason to give up a connection
            raise BusDisconnected("no time left")
        if self._socket is not None:
            if self._alive(self._socket):
                return False
            self._drop()
        if time.monotonic() >= self._not_before:
            if self._connected_to_one():
                self._failures = 0
                return True
            self._failures += 1
            backoff = min(MAX_BACKOFF_S, 0.05 * 2 ** min(self._failures, 8)) * random.uniform(0.5, 1.5)
            self._not_before = time.monotonic() + backoff
        raise type(self._failure)(self._failure.message)

    def _connected_to_one(self) -> bool:
        for untried in range(len(self._servers), 0, -1):
            now = time.monotonic()
            try:
                self._greet(self._servers[0], now + min(CONNECT_S, (self._deadline - now) / untried))
                return True
            except (BusError, ConfigError) as error:
                self._failure = error
                self._servers.rotate(-1)
        return False

    def _greet(self, server: Server, deadline: float) -> None:
        self._socket = BulkSocket(server.host, server.port, deadline)
        with self._ending_on_error() as connection:
            self._info = bulk_wire.parse_info(connection.line())
            if server.tls or self._tls is not None or self._info.tls_required:
                if not (self._info.tls_required or self._info.tls_available):
                    raise BusError(f"NATS at {server.label} does not offer TLS")
                connection.encrypt(self._tls or ssl.create_default_context(), server.host)
            subscribe = f"SUB {self.inbox}.* 1\r\nPING\r\n".encode()
            connection.send([bulk_wire.connect_command(server, self._name, self._signed()), subscribe])
            self._await_pong(connection)
            connection.deadline = self._deadline

    def _signed(self) -> dict[str, str]:
        try:
            return self._signer.answer(self._info.nonce) if self._signer and self._info.nonce else {}
        except ValueError as error:
            raise BusError(f"cannot log in by a key: {error}") from None

    def _alive(self, connection: BulkSocket) -> bool:
        """Hear what the server said while nobody listened. It ends a connection whose client leaves its PINGs
        unanswered, and firewalls forget silent ones.
        """
        connection.deadline = min(self._deadline, time.monotonic() + PONG_S)
        try:
            with self._ending_on_error():
                while connection.heard():
                    self._step(connection, _ignore)
                if time.monotonic() - self._used > IDLE_S:
                    connection.send([b"PING\r\n"])
                    self._await_pong(connection)
        except (BusError, ConfigError):
            return False
        connection.deadline = self._deadline
        return True

    def _await_pong(self, connection: BulkSocket) -> None:
        while self._step(connection, _ignore) != b"PONG":
            pass

    def _drop(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
