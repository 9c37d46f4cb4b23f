"""A request's body: JSON from anybody. Pure but for `read`."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from services.gateway.problems import Problem
from shared.errors import BadMessage, TooLarge

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
MAX_INT_DIGITS = 64
"""Python's own limit is thousands, and parsing takes the square of that."""


async def read(request: Request, most: int, seconds: float) -> bytes:
    """The whole body. Raises TooLarge as soon as it is known to be, a 408 when it does not come."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise TooLarge(f"the body has {declared} bytes; at most {most} are accepted")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise TooLarge(f"the body has more than {most} bytes")
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {seconds:g} s", "request_timeout") from None
    except ClientDisconnect:
        raise Problem(400, "the connection was closed before the body was complete", "bad_message") from None
    return bytes(body)


def parse(data: bytes, max_depth: int) -> dict[str, Any]:
    """A JSON object, to the letter: UTF-8, every name once, no NaN. Raises BadMessage saying what is wrong."""
    _check_depth(data, max_depth)
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_object,
            parse_constant=_not_json,
            parse_int=_integer,
            parse_float=_number,
        )
    except UnicodeDecodeError as error:
        raise BadMessage(f"the body is not UTF-8: byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise BadMessage(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise BadMessage("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise BadMessage("the body is a JSON object")
    return value


def _check_depth(data: bytes, most: int) -> None:
    """Counts brackets outside strings, before a parser recurses into them."""
    depth = 0
    for byte in _STRINGS.sub(b"", data).translate(None, _NO_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > most:
            raise BadMessage(f"the body is nested more than {most} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadMessage(f"the name {twice[:64]!r} stands twice in one object")
    return found


def _not_json(text: str) -> NoReturn:
    raise BadMessage(f"{text} is not JSON")


def _integer(text: str) -> int:
    if len(text) > MAX_INT_DIGITS:
        raise BadMessage(f"a number has more than {MAX_INT_DIGITS} digits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise BadMessage(f"the number {text[:40]} is too large")
    return value
