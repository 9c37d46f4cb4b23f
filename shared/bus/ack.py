"""The subject on which a delivery of JetStream is acked. It names the message and the delivery, so whoever knows it can
end the job, on any connection.

It reads `$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<consumer sequence>.<nanoseconds since 1970>.<pending>`, or
the same with `<domain>.<account>.` after `$JS.ACK.` and perhaps one token more at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.errors import BusError, InvalidField

MAX_LENGTH = 1024
_STREAM_AT = {9: 2, 11: 4, 12: 4}
"""Number of tokens → where the stream's name is."""
_WORD = re.compile(r"[!-~]+")
_WILDCARDS = frozenset("*>")
_NUMBER = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Ack:
    stream: str
    consumer: str
    delivered: int
    seq: int
    consumer_seq: int
    stamp: int


def parse_ack(subject: str) -> Ack:
    """Raises BusError for anything but an ack subject without wildcards."""
    tokens = subject.split(".") if len(subject) <= MAX_LENGTH else []
    at = _STREAM_AT.get(len(tokens))
    if at is None or tokens[:2] != ["$JS", "ACK"] or not all(map(_is_word, tokens)):
        raise BusError("not JetStream's ack subject")
    numbers = tokens[at + 2 : at + 7]
    if not all(map(_NUMBER.fullmatch, numbers)):
        raise BusError("an ack subject whose numbers are none")
    delivered, seq, consumer_seq, stamp = map(int, numbers[:4])
    if not delivered or not seq:
        raise BusError("an ack subject of no delivery")
    return Ack(tokens[at], tokens[at + 1], delivered, seq, consumer_seq, stamp)


def parse_handle(stream: str, handle: str) -> Ack:
    """What another worker says that a job of `stream` is acked on. Raises InvalidField."""
    try:
        ack = parse_ack(handle)
    except BusError as error:
        raise InvalidField(f"handle: {error}", field="handle") from None
    if ack.stream != stream:
        raise InvalidField(f"handle: it is not one of stream {stream}", field="handle")
    return ack


def _is_word(token: str) -> bool:
    return bool(_WORD.fullmatch(token)) and _WILDCARDS.isdisjoint(token)
