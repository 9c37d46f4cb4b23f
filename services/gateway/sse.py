"""Server-sent events: framing, and ids by which a client that lost its connection goes on. Pure.

An event's id is `<request>:<position>`, the position of a choice being `<tokens>.<characters>`: how many tokens and
characters of its answer a client has that has this event and all before it. Those of several choices are separated by
commas. (WHATWG HTML, 9.2 Server-sent events.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidField

DONE = b"data: [DONE]\n\n"
COMMENT = b": the answer has not gone on yet\n\n"
HEADER = "last-event-id"
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_ID = re.compile(r"((?:chatcmpl|cmpl)-[0-9a-f]{32}):(\d{1,9}\.\d{1,9}(?:,\d{1,9}\.\d{1,9}){0,127})", re.ASCII)


@dataclass(slots=True)
class Position:
    """What a client has of one choice."""

    tokens: int = 0
    characters: int = 0

    def __str__(self) -> str:
        return f"{self.tokens}.{self.characters}"


def event(data: Mapping[str, Any], event_id: str = "") -> bytes:
    """JSON escapes line ends, so the data is always one line."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}data: {_JSON.encode(data)}\n\n".encode()


def event_id(request_id: str, positions: Sequence[Position]) -> str:
    return f"{request_id}:{','.join(map(str, positions))}"


def parse_event_id(text: str) -> tuple[str, list[Position]]:
    """Raises InvalidField for an id that was not given out here."""
    match = _ID.fullmatch(text)
    if match is None:
        raise InvalidField("Last-Event-ID: not an id of an event of this API", field="last_event_id")
    places = (place.split(".") for place in match[2].split(","))
    return match[1], [Position(int(tokens), int(characters)) for tokens, characters in places]


def request_ids(base: str, choices: int) -> list[str]:
    """Ids on the bus: an only choice has that of the answer itself."""
    return [base] if choices == 1 else [f"{base}-{index}" for index in range(choices)]
