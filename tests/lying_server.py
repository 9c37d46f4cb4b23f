"""Servers that the bulk connection is tested against: nats-servers with log-in and TLS, and ones that lie."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from shared.bus.embedded import find_server

# Made for these tests: valid for 127.0.0.1 and localhost until 2120, and trusted by nobody else.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBejCCAR+gAwIBAgIBAjAKBggqhkjOPQQDAjAVMRMwEQYDVQQDDAp0cmluZSB0
ZXN0MCAXDTIwMDEwMTAwMDAwMFoYDzIxMjAwMTAxMDAwMDAwWjAVMRMwEQYDVQQD
DAp0cmluZSB0ZXN0MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEXNIdvQutBPFv
SlHh5BGKdSYUjfkh4WdNxzDVqhEEr786p8Jlbl1kWVeF2g0uSIs7a/CiUQCHOAdQ
tlOUhidJJKNeMFwwGgYDVR0RBBMwEYcEfwAAAYIJbG9jYWxob3N0MA8GA1UdEwEB
/wQFMAMBAf8wHQYDVR0OBBYEFKi37VRHDI+pf+5tj9VAI5fmTAkmMA4GA1UdDwEB
/wQEAwIChDAKBggqhkjOPQQDAgNJADBGAiEAoLXSqYzzQ/IK6ieYBfySd3Ar6C2y
8JKbUrXT07Ozr3ACIQCgcLOB/VMzls1zli0VUbZYSYBzDY/3sb10LbU/Pa0evA==
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgnE4NANdwugCFZb3/
3d94938tlT/Y35+5+Mjtq00fF1uhRANCAARc0h29C60E8W9KUeHkEYp1JhSN+SHh
Z03HMNWqEQSvvzqnwmVuXWRZV4XaDS5Iiztr8KJRAIc4B1C2U5SGJ0kk
-----END PRIVATE KEY-----
"""
TIMEOUT = 10.0
MAX_PAYLOAD = 1 << 20


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def nats_server(folder: Path, config: str) -> Iterator[str]:
    """The address of a nats-server with JetStream and `config` besides; `{folder}` in it is where KEY and CERTIFICATE
    are.
    """
    port = free_port()
    (folder / "cert.pem").write_text(CERTIFICATE)
    (folder / "key.pem").write_text(KEY)
    file = folder / "nats.conf"
    lines = (f"host: 127.0.0.1, port: {port}", f'jetstream {{ store_dir: "{folder}" }}', config)
    file.write_text("\n".join(lines).replace("{folder}", str(folder)))
    process = subprocess.Popen([str(find_server()), "-c", str(file)], stderr=subprocess.DEVNULL)
    try:
        _await_greeting(port)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(5)


def _await_greeting(port: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                assert connection.recv(4) == b"INFO"
                return
        except OSError:
            assert time.monotonic() < deadline, "nats-server did not start"
            time.sleep(0.02)


class Peer:
    """One connection, as a lying server sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connection.settimeout(TIMEOUT)
        self._read = bytearray()

    def say(self, *parts: bytes) -> None:
        self.connection.sendall(b"".join(parts))

    def info(self, **more: object) -> None:
        said = {"headers": True, "max_payload": MAX_PAYLOAD, **more}
        self.say(b"INFO ", json.dumps(said).encode(), b"\r\n")

    def line(self) -> bytes:
        """The next line. Raises EOFError."""
        while (end := self._read.find(b"\n")) < 0:
            self._more()
        return self._take(end + 1).strip()

    def _more(self) -> None:
        data = self.connection.recv(1 << 16)
        if not data:
            raise EOFError
        self._read += data

    def _take(self, size: int) -> bytes:
        while len(self._read) < size:
            self._more()
        data = bytes(self._read[:size])
        del self._read[:size]
        return data

    def says_nothing(self, seconds: float) -> bool:
        """Whether nothing comes for so long."""
        self.connection.settimeout(seconds)
        with suppress(TimeoutError):
            self._more()
        self.connection.settimeout(TIMEOUT)
        return not self._read

    def greet(self, **more: object) -> bytes:
        """Log in whoever it is; returns his CONNECT."""
        self.info(**more)
        connect = self.line()
        while self.line() != b"PING":
            pass
        self.say(b"PONG\r\n")
        return connect

    def published(self) -> tuple[bytes, bytes, bytes]:
        """The next message he publishes: (subject, reply, payload)."""
        while True:
            verb, *words = self.line().split()
            if verb in (b"PUB", b"HPUB"):
                data = self._take(int(words[-1]))
                assert self._take(2) == b"\r\n"
                return words[0], words[1], data[int(words[-2]) if verb == b"HPUB" else 0 :]

    def answer(self, reply: bytes, data: bytes) -> None:
        self.say(b"MSG %s 1 %d\r\n" % (reply, len(data)), data, b"\r\n")

    def ack(self, reply: bytes, seq: int) -> None:
        self.answer(reply, b'{"stream":"S","seq":%d}' % seq)

    def status(self, reply: bytes, code: int) -> None:
        self.stored(reply, f"NATS/1.0 {code}\r\n\r\n", b"")

    def message(self, reply: bytes, subject: str, seq: int, data: bytes) -> None:
        self.stored(reply, f"NATS/1.0\r\nNats-Subject: {subject}\r\nNats-Sequence: {seq}\r\n\r\n", data)

    def stored(self, reply: bytes, headers: str, data: bytes) -> None:
        size = len(headers)
        self.say(b"HMSG %s 1 %d %d\r\n" % (reply, size, size + len(data)), headers.encode(), data, b"\r\n")

    def until_closed(self) -> None:
        """Listen until he goes."""
        while self.connection.recv(1 << 16):
            pass


Turn = Callable[[Peer], None]


class LyingServer:
    """Each connection gets the next of `turns`, the last one again and again. A turn that ends closes its connection.

    What a turn raises, other than that its peer is gone, is raised again at the end.
    """

    def __init__(self, *turns: Turn) -> None:
        self._turns: Sequence[Turn] = turns
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._peers: list[socket.socket] = []
        self._errors: list[BaseException] = []
        self.url = f"nats://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0

    def __enter__(self) -> LyingServer:
        self._start(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for open_ in (self._listener, *self._peers):
            with suppress(OSError):
                open_.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive()
        self._listener.close()
        if self._errors and error is None:
            raise self._errors[0]

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            turn = self._turns[min(self.connections, len(self._turns) - 1)]
            self.connections += 1
            self._peers.append(connection)
            self._start(partial(self._take, turn, connection))

    def _take(self, turn: Turn, connection: socket.socket) -> None:
        with connection:
            try:
                with suppress(OSError, EOFError):
                    turn(Peer(connection))
            except BaseException as error:
                self._errors.append(error)
