"""The only place that spells a NATS subject or a stream name.

Model, worker and request ids are user text. `token` maps any text to one subject token, reversibly, so that
no id can widen a subject (`.`), match others (`*`, `>`) or collide with another id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PRIORITIES = ("high", "normal", "low")
ROLES = ("prefill", "decode", "drafter")

_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_ESCAPED = re.compile(r"=([0-9A-F]{2})")


def token(text: str) -> str:
    """One NATS subject token for `text`: bytes outside [A-Za-z0-9_-] become `=XX` (hex of UTF-8).

    Raises ValueError for the empty string, which cannot be a token.
    """
    if not text:
        raise ValueError("an empty id cannot be part of a subject")
    return "".join(chr(b) if b in _SAFE else f"={b:02X}" for b in text.encode())


def text(token_: str) -> str:
    """The inverse of `token`."""
    raw = _ESCAPED.sub(lambda m: chr(int(m.group(1), 16)), token_)
    return raw.encode("latin-1").decode()


@dataclass(frozen=True)
class Subjects:
    """Subjects and streams of one served model."""

    model: str

    @property
    def prefix(self) -> str:
        return f"trine.{token(self.model)}"

    # Work queue of requests, one subject per priority.
    def request(self, priority: str) -> str:
        if priority not in PRIORITIES:
            raise ValueError(f"priority must be one of {PRIORITIES}")
        return f"{self.prefix}.req.{priority}"

    @property
    def requests(self) -> str:
        return f"{self.prefix}.req.*"

    # Refusals of messages whose request id cannot be read.
    @property
    def refused(self) -> str:
        return f"{self.prefix}.refused"

    # Work queue of prefill jobs; the last token is the name of the job's last block.
    def prefill(self, name: bytes) -> str:
        return f"{self.prefix}.prefill.{name.hex()}"

    @property
    def prefills(self) -> str:
        return f"{self.prefix}.prefill.*"

    # Prefix cache.
    def block(self, name: bytes, part: int = 0) -> str:
        return f"{self.prefix}.kv.{name.hex()}.{part}"

    @property
    def blocks(self) -> str:
        return f"{self.prefix}.kv.*.*"

    # Token events.
    def events(self, request_id: str) -> str:
        return f"{self.prefix}.tok.{token(request_id)}"

    @property
    def all_events(self) -> str:
        return f"{self.prefix}.tok.*"

    def draft(self, drafter: str) -> str:
        return f"{self.prefix}.draft.{token(drafter)}"

    def cancel(self, request_id: str) -> str:
        return f"{self.prefix}.cancel.{token(request_id)}"

    @property
    def cancels(self) -> str:
        return f"{self.prefix}.cancel.*"

    def beat(self, role: str, worker: str) -> str:
        return f"{self.prefix}.beat.{role}.{token(worker)}"

    @property
    def beats(self) -> str:
        return f"{self.prefix}.beat.*.*"

    # Streams and consumers.
    def _stream(self, kind: str) -> str:
        return f"TRINE_{token(self.model)}_{kind}"

    @property
    def request_stream(self) -> str:
        return self._stream("REQ")

    @property
    def prefill_stream(self) -> str:
        return self._stream("PREFILL")

    @property
    def block_stream(self) -> str:
        return self._stream("KV")

    @property
    def event_stream(self) -> str:
        return self._stream("TOK")

    @staticmethod
    def request_consumer(priority: str) -> str:
        return f"decode-{priority}"

    @property
    def prefill_consumer(self) -> str:
        return "prefill"


ALL_REQUESTS = "trine.*.req.*"  # every model's; the fleet watches it to answer for models nobody serves
ALL_BEATS = "trine.*.beat.*.*"


def model_of(subject: str) -> str:
    """The model id in any subject spelled here. Raises ValueError for a token that spells no text."""
    return text(subject.split(".")[1])


def last(subject: str) -> str:
    """The id in the last token of a subject. Raises ValueError for a token that spells no text."""
    return text(subject.rsplit(".", 1)[1])


def block_of(subject: str) -> tuple[bytes, int]:
    """(name, part) of a block subject. Raises ValueError for any other subject."""
    _, _, kind, name, part = subject.split(".")
    if kind != "kv":
        raise ValueError(f"not a block subject: {subject}")
    return bytes.fromhex(name), int(part)
