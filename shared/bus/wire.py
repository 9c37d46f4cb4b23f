"""What NATS's protocol lays down: how a subject pattern matches (`*` is one token, a last `>` one or more) and what
headers weigh.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from shared.errors import BusError, TooLarge

DEFAULT_MAX_PENDING = 64 << 20
"""nats-server's own default for `max_pending`, in bytes."""
INBOX = "_INBOX."
"""Where answers go."""
MAX_MESSAGE_ID = 1024
"""Bytes. Sent as a header, in the room that a bus keeps free beside the largest payload."""


def new_inbox(user: str | None, prefix: str = "") -> str:
    """Where a connection hears answers: under its user's name, or under `prefix`, so that permissions can keep others
    from listening. What comes there are requests of a queue, and what they are acked with.
    """
    own = f"{user}." if user is not None and re.fullmatch(r"[A-Za-z0-9_-]+", user) else ""
    return f"{prefix}.{secrets.token_hex(11)}" if prefix else f"{INBOX}{own}{secrets.token_hex(11)}"


def names_user(url: str) -> bool:
    """Whether an address, or one of several, brings a user or a token."""
    return any("@" in part for part in url.split(","))


def user_of(url: str) -> str | None:
    """Who logs in by this address; None for nobody, or by a token."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    return parts.username if parts.password is not None else None


def without_login(url: str) -> str:
    """The address for people to read: without the credentials in it."""
    parts = [part.rpartition("@") for part in url.split(",")]
    return ",".join(f"{login.partition('//')[0]}//{rest}" if "//" in login else rest for login, _, rest in parts)


def header_bytes(headers: Mapping[str, str] | None) -> int:
    """Size of `headers` on the wire, 0 without any."""
    if not headers:
        return 0
    return len("NATS/1.0\r\n\r\n") + sum(len(k.encode()) + len(v.encode()) + len(": \r\n") for k, v in headers.items())


def largest_page(max_pending: int) -> int:
    """`max_bytes` of a batched get, so that two pages fit into what the server holds for a connection: beyond
    `max_pending` it drops messages and still reports a complete batch, or ends the connection.

    The page before counts until the server's write of it has returned, which may be after all of it was read here. A
    page is longer than asked for by one message and by its messages' headers; half of `max_pending` is left for those.
    """
    return max_pending // 4


def check_message_id(message_id: str) -> None:
    """Raises TooLarge."""
    if len(message_id.encode()) > MAX_MESSAGE_ID:
        raise TooLarge(f"a message id has at most {MAX_MESSAGE_ID} bytes")


def check_filter(subject: str) -> None:
    """Raises BusError for the empty filter, which NATS takes for everything."""
    if not subject:
        raise BusError("an empty subject names no messages")


def matches(pattern: str, subject: str) -> bool:
    """Whether a literal `subject` is one of those that `pattern` names."""
    if pattern == subject:
        return True
    wanted, tokens = pattern.split("."), subject.split(".")
    for i, want in enumerate(wanted):
        if want == ">":
            return len(tokens) > i
        if i >= len(tokens) or want not in ("*", tokens[i]):
            return False
    return len(wanted) == len(tokens)


def overlaps(a: str, b: str) -> bool:
    """Whether some literal subject matches both patterns."""
    left, right = a.split("."), b.split(".")
    for i in range(max(len(left), len(right))):
        if i >= len(left) or i >= len(right):
            return False
        if ">" in (left[i], right[i]):
            return True
        if "*" not in (left[i], right[i]) and left[i] != right[i]:
            return False
    return True
