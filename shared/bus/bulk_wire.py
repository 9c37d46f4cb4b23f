"""The part of NATS's client protocol that bulk transfer needs, as pure functions over bytes. No I/O.

Protocol: https://docs.nats.io/reference/reference-protocols/nats-protocol. What a server sends is untrusted: every
function refuses what is not the protocol with BusError, and no error repeats bytes that may hold our credentials.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from shared.errors import BusError, ConfigError, TooLarge

DEFAULT_PORT = 4222
MAX_LINE = 4096
"""Bytes of the longest control line that a server takes (its `max_control_line`)."""
MAX_PAYLOAD = 64 << 20
"""No nats-server can be configured to more."""
VERSION_LINE = b"NATS/1.0"
_SHOWN = 200
"""Characters of a server's words in an error."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is and how to log in there. `user` without `password` is a token."""

    host: str
    port: int
    tls: bool = False
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @property
    def login(self) -> str | None:
        """The user, where there is one; a token is a secret and names nobody."""
        return self.user if self.password is not None else None

    @property
    def label(self) -> str:
        """`host:port`, for errors."""
        return f"{self.host}:{self.port}"

    def quoted(self, said: bytes) -> str:
        """What the server said, fit for an error: short, printable, and without our credentials."""
        text = "".join(c if c.isprintable() else "?" for c in said.decode("utf-8", "replace"))
        secrets = [s for s in (self.password, None if self.password else self.user) if s]
        if any(secret in text or json.dumps(secret)[1:-1] in text for secret in secrets):
            return "(withheld: it repeats our credentials)"
        return text[:_SHOWN]


def parse_servers(url: str, user: str | None = None, password: str | None = None) -> list[Server]:
    """`nats://user:password@host:port`, `nats://token@host`, `tls://...`; several are separated by commas. `user` logs
    in where the address names nobody.

    Credentials are taken as they are written, without decoding `%`: so does the control connection's library, and
    one address must log in the same way on both. Raises ConfigError, which does not repeat the address.
    """
    servers = [_parse_server(part.strip()) for part in url.split(",")]
    return [replace(s, user=user, password=password) if s.user is None else s for s in servers]


def _parse_server(url: str) -> Server:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        port = parts.port or DEFAULT_PORT
    except ValueError:
        raise ConfigError("not a NATS address", field="nats_url") from None
    if not parts.hostname or parts.scheme not in ("nats", "tls"):
        raise ConfigError("a NATS address reads nats://HOST:PORT or tls://HOST:PORT", field="nats_url")
    return Server(parts.hostname, port, parts.scheme == "tls", parts.username, parts.password)


@dataclass(frozen=True, slots=True)
class Info:
    """What a server says of itself. `max_payload`: bytes of one message, headers included."""

    max_payload: int
    tls_required: bool
    tls_available: bool
    nonce: str = ""
    """To be signed by who logs in by a key."""


def parse_info(line: bytes) -> Info:
    """Parse `INFO {...}`. Raises BusError, also for a server without headers (older than 2.2)."""
    verb, _, text = line.partition(b" ")
    try:
        info = json.loads(text) if verb.upper() == b"INFO" else None
    except (ValueError, RecursionError):
        info = None
    if not isinstance(info, dict):
        raise BusError("not a NATS server: no INFO")
    limit = info.get("max_payload")
    if type(limit) is not int or limit <= 0 or info.get("headers") is not True:
        raise BusError("a NATS server without headers or without max_payload")
    nonce = info.get("nonce")
    return Info(
        min(limit, MAX_PAYLOAD),
        bool(info.get("tls_required")),
        bool(info.get("tls_available")),
        nonce if isinstance(nonce, str) else "",
    )


def connect_command(server: Server, name: str, signed: Mapping[str, str] | None = None) -> bytes:
    """CONNECT with what we need: headers, no +OK after each command, 503 instead of silence. `signed`: see
    `nkey.Signer.answer`.
    """
    options: dict[str, Any] = {
        "verbose": False, "pedantic": False, "headers": True, "no_responders": True,
        "lang": "python-trine", "version": "1", "protocol": 1, "name": name,
    }  # fmt: skip
    if server.user is not None and server.password is not None:
        options |= {"user": server.user, "pass": server.password}
    elif server.user is not None:
        options["auth_token"] = server.user
    options |= signed or {}
    return b"CONNECT " + json.dumps(options).encode() + b"\r\n"


@dataclass(frozen=True, slots=True)
class Delivery:
    """The control line of a message: `headers` bytes of headers follow it, then `payload` bytes, then CRLF."""

    subject: str
    headers: int
    payload: int


def parse_delivery(line: bytes) -> Delivery:
    """Parse `MSG <subject> <sid> [reply] <size>` or `HMSG <subject> <sid> [reply] <headers> <size>`."""
    words = line.split() if len(line) <= MAX_LINE else []  # Python refuses to read numbers of more digits than that
    verb = words[0].upper() if words else b""
    if verb == b"MSG" and len(words) in (4, 5) and words[-1].isdigit():
        return Delivery(words[1].decode("utf-8", "replace"), 0, int(words[-1]))
    if verb == b"HMSG" and len(words) in (5, 6) and words[-1].isdigit() and words[-2].isdigit():
        headers, size = int(words[-2]), int(words[-1])
        if 0 < headers <= size:
            return Delivery(words[1].decode("utf-8", "replace"), headers, size - headers)
    raise BusError("a message whose first line is not NATS's protocol")


def parse_headers(block: bytes) -> tuple[int | None, dict[str, str]]:
    """(status code, None for an ordinary message; headers). Of a repeated header the last counts: the server appends
    its own to those of a stored message, so that no publisher can forge them. Raises BusError.
    """
    first, *lines = block.split(b"\r\n")
    version, _, words = first.partition(b" ")
    if version != VERSION_LINE:
        raise BusError("a message whose headers are not NATS headers")
    code = words.split(None, 1)[:1]
    status = int(code[0]) if code and code[0].isdigit() and len(code[0]) == 3 else None
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if colon:
            headers[name.decode("latin-1")] = value.strip().decode("latin-1")
    return status, headers


def publish(subject: str, reply: str, headers: Mapping[str, str], payload: int) -> bytes:
    """What goes before a payload of so many bytes; CRLF goes after it. Raises BusError, TooLarge."""
    if not headers:
        return _command(b"PUB", subject, reply, f"{payload}")
    block = VERSION_LINE + b"\r\n" + b"".join(f"{k}: {v}\r\n".encode() for k, v in headers.items()) + b"\r\n"
    return _command(b"HPUB", subject, reply, f"{len(block)} {len(block) + payload}") + block


def _command(verb: bytes, subject: str, reply: str, sizes: str) -> bytes:
    if not subject.isprintable() or " " in subject or not subject:
        raise BusError(f"not a subject: {subject[:_SHOWN]!r}")
    line = b" ".join((verb, subject.encode(), reply.encode(), sizes.encode())) + b"\r\n"
    if len(line) > MAX_LINE:
        raise TooLarge(f"a subject of {len(subject.encode())} bytes; the server would cut the connection")
    return line
