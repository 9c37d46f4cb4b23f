"""Fuzz target of all messages, and what must hold of a message and of a refusal."""

from __future__ import annotations

from shared.codec import Format, decode, decode_event, encode, format_of
from shared.errors import RequestError
from shared.messages import MESSAGE_TYPES, Event, Failed, Generate, Message

LONGEST_ERROR = 8192
"""Characters. An error goes back to a client, so bytes must not blow it up."""


def tellable(error: RequestError) -> None:
    """Clients hear of it, in either encoding."""
    assert len(error.message) <= LONGEST_ERROR and len(error.field or "") <= LONGEST_ERROR
    failed = Failed(id="x", code=error.code, message=error.message, field=error.field)
    for format in Format:
        assert decode_event(encode(failed, format)) == failed


def check_messages(data: bytes) -> None:
    for kind in MESSAGE_TYPES:
        try:
            message = decode(data, kind)
        except RequestError as error:
            tellable(error)
        else:
            _same_again(message, format_of(data) if issubclass(kind, Generate | Event) else Format.MSGPACK)


def _same_again(message: Message, came_as: Format) -> None:
    again = encode(message, came_as)
    assert decode(again, type(message)) == message


def seeds_of_messages() -> list[bytes]:
    from tests.unit.test_messages import EXAMPLES

    found = [encode(message) for message in EXAMPLES]
    return found + [encode(m, Format.JSON) for m in EXAMPLES if isinstance(m, Generate | Event)]
