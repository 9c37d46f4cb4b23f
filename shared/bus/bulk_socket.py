"""A blocking socket for bulk bytes, with a deadline: gathers what it sends, receives in place, reads little ahead.

`sendmsg` and `recv_into` release the GIL, so that a thread that waits here costs an event loop nothing. Socket buffers
are left to the kernel: fixed sizes were measured no faster, and where the system's limit is low they are slower than
what the kernel finds by itself.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence

from shared.errors import BusDisconnected, BusError

BUFFER = 16 << 10
"""Bytes read ahead. Also the longest line taken; the first bytes of a payload are copied out of it."""
GATHER = 64
"""Pieces of one `sendmsg`, far below the kernel's limit of 1,024."""
KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class BulkSocket:
    """Connected when made. Waits until `deadline` (of `time.monotonic`) at most; every trouble is BusDisconnected.

    After an error nothing that follows can be understood: close it.
    """

    def __init__(self, host: str, port: int, deadline: float) -> None:
        self.deadline = deadline
        self._bytes = bytearray(BUFFER)
        self._buffer = memoryview(self._bytes)
        self._begin = self._end = 0  # of what was read ahead
        try:
            self._socket = _dial(host, port, deadline)
        except (OSError, UnicodeError) as error:
            raise BusDisconnected(f"cannot connect to {host}:{port}: {error}") from None

    def encrypt(self, context: ssl.SSLContext, host: str) -> None:
        """Go on with TLS. Raises BusError when the peer has said more, before it proved who it is."""
        if self._begin != self._end:
            raise BusError("the server speaks before TLS has begun")
        try:
            self._socket = context.wrap_socket(self._armed(), server_hostname=host)
        except OSError as error:
            raise BusDisconnected(f"no TLS with {host}: {error}") from None

    def interrupt(self) -> None:
        """From any thread: whoever waits here gets BusDisconnected."""
        with contextlib.suppress(OSError):
            # Not SSLSocket's own method: after it the other thread would read bytes that are still encrypted.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """All parts, in order, from where they lie."""
        views = deque(memoryview(part).cast("B") for part in parts if memoryview(part).nbytes)
        while views:
            try:
                sent = self._send_some(views)
            except OSError as error:
                raise BusDisconnected(f"the bulk connection is lost: {error}") from None
            while views and sent >= views[0].nbytes:
                sent -= views.popleft().nbytes
            if sent:
                views[0] = views[0][sent:]

    def _send_some(self, views: deque[memoryview]) -> int:
        connection = self._armed()
        if isinstance(connection, ssl.SSLSocket):  # has no sendmsg
            return connection.send(views[0])
        return connection.sendmsg([view for view, _ in zip(views, range(GATHER), strict=False)])

    def fill(self, place: memoryview) -> None:
        """Exactly as many bytes as `place` has: first what was read ahead, the rest from the socket into it."""
        if not place.nbytes:
            return
        place = place.cast("B")
        have = min(self._end - self._begin, place.nbytes)
        place[:have] = self._buffer[self._begin : self._begin + have]
        self._begin += have
        while have < place.nbytes:
            have += self._receive_some(place[have:])

    def exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def skip(self, count: int) -> None:
        while count > 0:
            if self._begin == self._end:
                self._begin, self._end = 0, self._receive_some(self._buffer)
            step = min(count, self._end - self._begin)
            self._begin += step
            count -= step

    def line(self) -> bytes:
        """Up to the next line feed, without it. Raises BusError when none comes within BUFFER bytes."""
        searched = 0
        while (at := self._bytes.find(b"\n", self._begin + searched, self._end)) < 0:
            searched = self._end - self._begin
            if searched == BUFFER:
                raise BusError("the server sends a line without end")
            self._buffer[:searched] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, searched
            self._end += self._receive_some(self._buffer[searched:])
        line = bytes(self._buffer[self._begin : at])
        self._begin = at + 1
        return line.removesuffix(b"\r")

    def heard(self) -> bool:
        """Whether there is something to read; does not wait."""
        if self._begin < self._end:
            return True
        connection = self._armed()
        connection.settimeout(0)
        try:
            count = connection.recv_into(self._buffer)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            count = 0
        self._begin, self._end = 0, _some(count)
        return True

    def _receive_some(self, place: memoryview) -> int:
        try:
            return _some(self._armed().recv_into(place))
        except OSError as error:
            raise BusDisconnected(f"the bulk connection is lost: {error}") from None

    def _armed(self) -> socket.socket:
        try:
            self._socket.settimeout(_left(self.deadline))
        except TimeoutError as error:
            raise BusDisconnected(f"{error}") from None
        except OSError as error:
            raise BusDisconnected(f"the bulk connection is lost: {error}") from None
        return self._socket


def _some(count: int) -> int:
    if not count:
        raise BusDisconnected("the server has closed the bulk connection")
    return count


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


def _dial(host: str, port: int, deadline: float) -> socket.socket:
    failure: OSError = OSError("no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_left(deadline))
            connection.connect(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                if hasattr(socket, option):  # not on every system
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            return connection
        except OSError as error:
            connection.close()
            failure = error
    raise failure
