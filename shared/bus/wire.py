"""What NATS's protocol lays down: how a subject pattern matches (`*` is one token, a last `>` one or more) and what
headers weigh.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import TooLarge

DEFAULT_MAX_PENDING = 64 << 20
"""nats-server's own default for `max_pending`, in bytes."""
MAX_MESSAGE_ID = 1024
"""Bytes. Sent as a header, in the room that a bus keeps free beside the largest payload."""


def header_bytes(headers: Mapping[str, str] | None) -> int:
    """Size of `headers` on the wire, 0 without any."""
    if not headers:
        return 0
    return len("NATS/1.0\r\n\r\n") + sum(len(k.encode()) + len(v.encode()) + len(": \r\n") for k, v in headers.items())


def check_message_id(message_id: str) -> None:
    """Raises TooLarge."""
    if len(message_id.encode()) > MAX_MESSAGE_ID:
        raise TooLarge(f"a message id has at most {MAX_MESSAGE_ID} bytes")


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
