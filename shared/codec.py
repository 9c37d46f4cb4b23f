"""Bytes to messages and back. The first byte tells JSON (`{`) from msgpack; only `Generate` and events may be JSON.

Everything from the bus is untrusted: sizes are checked before parsing, nesting is bounded by both parsers,
extension types are refused, and a message that does not fit its schema raises a `RequestError` naming the field.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Annotated, Any, NoReturn, TypeVar

import msgpack
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from shared.errors import BadMessage, InvalidField, TooLarge, UnsupportedVersion
from shared.messages import PROTOCOL_VERSION, Event, Failed, Finished, Generate, Message, Tokens

M = TypeVar("M", bound=Message)
_EVENT: TypeAdapter[Tokens | Finished | Failed] = TypeAdapter(
    Annotated[Tokens | Finished | Failed, Field(discriminator="type")]
)


MAX_PATH = 64  # characters of each part of a field's path that an error repeats: clients choose unknown names


class Format(Enum):
    JSON = "json"
    MSGPACK = "msgpack"


def format_of(data: bytes) -> Format:
    return Format.JSON if data[:1] == b"{" else Format.MSGPACK


def encode(message: Message, format: Format = Format.MSGPACK) -> bytes:
    if format is Format.JSON:
        return message.model_dump_json(exclude_none=True).encode()
    packed: bytes = msgpack.packb(message.model_dump(exclude_none=True), use_bin_type=True)
    return packed


def decode(data: bytes, expected: type[M]) -> M:
    """The message of type `expected` in `data`.

    Raises TooLarge, BadMessage, UnsupportedVersion or InvalidField (with the field's name).
    """
    schema: TypeAdapter[M] = _schema(expected)
    return _decode(data, expected.max_bytes, schema, json_allowed=issubclass(expected, Generate | Event))


def decode_event(data: bytes) -> Tokens | Finished | Failed:
    """Any event of a request's event subject, in either encoding."""
    return _decode(data, Event.max_bytes, _EVENT, json_allowed=True)


@cache
def _schema(expected: type[Message]) -> TypeAdapter[Any]:
    return TypeAdapter(expected)


def _unpack(data: bytes) -> dict[str, Any]:
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_refuse_ext, timestamp=0)
    except (ValueError, msgpack.UnpackException, RecursionError, TypeError) as error:
        raise BadMessage(f"neither a JSON object nor msgpack: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise BadMessage("a message is a map")
    return value


def _refuse_ext(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")


def _decode(data: bytes, max_bytes: int, schema: TypeAdapter[M], *, json_allowed: bool) -> M:
    if len(data) > max_bytes:
        raise TooLarge(f"{len(data)} bytes; at most {max_bytes} are accepted")
    unpacked = None if json_allowed and format_of(data) is Format.JSON else _unpack(data)
    try:
        message = schema.validate_json(data) if unpacked is None else schema.validate_python(unpacked)
    except ValidationError as error:
        _raise(error, unpacked)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"unreadable: {type(error).__name__}") from None
    if message.v != PROTOCOL_VERSION:
        raise UnsupportedVersion(f"protocol version {message.v}; this worker speaks {PROTOCOL_VERSION}", field="v")
    return message


def _raise(error: ValidationError, data: dict[str, Any] | None) -> NoReturn:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        raise BadMessage(f"not JSON: {first['msg']}")
    version = data.get("v", PROTOCOL_VERSION) if data else PROTOCOL_VERSION
    if version != PROTOCOL_VERSION:
        raise UnsupportedVersion(f"protocol version {version!r:.20}; this worker speaks {PROTOCOL_VERSION}", field="v")
    path = [str(p)[:MAX_PATH] for p in first["loc"]]
    field = ".".join(path[:3]) or None
    raise InvalidField(f"{field or 'message'}: {reason(first)}", field=field)


def reason(error: ErrorDetails) -> str:
    """What pydantic found wrong, in words for somebody who does not know pydantic."""
    if error["type"] == "extra_forbidden":
        return "there is no such field"
    return error["msg"].removeprefix("Value error, ")
