"""Calls of tools in a model's text, as models write them that learned the Hermes format. Pure.

    I will look that up.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

What is between the tags may also be a list of calls, and the last closing tag may be missing. All else is content: text
before and after calls, and a call that is not well-formed or not of a tool that was offered, with its tags. White space
around calls is none of either. (NousResearch, Hermes-Function-Calling; Qwen2.5 and SmolLM2 have the same.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from shared.messages.tools import arguments_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ARGUMENTS = ("arguments", "parameters")
MAX_GAP = 1024
"""White space that is longer is content: what is held back is looked at again with each piece."""
_IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_STRING = re.compile(r'"[^"\\]*+(?:\\[^\x00-\x1f][^"\\]*+)*+"')
_CONTROL = re.compile(r"[\x00-\x1f]")
_SPACE = re.compile(r"[ \t\r\n]*")
_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Called:
    """`arguments` is an object in JSON, as the model wrote it; control characters in its texts are escaped."""

    name: str
    arguments: str


Piece = str | Called
"""Content, or a call."""


class ToolCallParser:
    """Feed the text as it comes. What came out so far depends on the text so far, and not on how it was cut."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the tools that were offered."""
        self._names = frozenset(names)
        self._text = ""
        """Not read yet: it may be the beginning of a tag or of an escape, or white space before a call."""
        self._gap = ""
        """White space that is content unless a call follows it."""
        self._body: list[str] | None = None
        """What has been read of a call, between its tags."""
        self._in_string = False
        self._fresh = True
        """Nothing was shown since the beginning, or since the last call."""
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while self._read(pieces):
            pass
        return pieces

    def end(self) -> list[Piece]:
        """What is left when there is no more text. The parser is of no use afterwards."""
        pieces: list[Piece] = []
        if self._body is not None:
            self._finish(pieces, self._text)
        elif not (self._fresh and self.calls and _is_gap(self._text)):
            self._show(pieces, self._text)
        return pieces

    def _read(self, pieces: list[Piece]) -> bool:
        """Whether there is more to read."""
        if self._body is None:
            return self._read_content(pieces)
        if not self._body:
            start = _SPACE.match(self._text).end()  # type: ignore[union-attr]
            if start == len(self._text) <= MAX_GAP:
                return False
            if start > MAX_GAP or self._text[start] not in "{[":
                self._body = None
                self._show(pieces, OPEN)
                return True
        return self._read_call(pieces)

    def _read_content(self, pieces: list[Piece]) -> bool:
        before, tag, rest = self._text.partition(OPEN)
        if tag:
            if self._fresh and _is_gap(before):
                self._gap = before
            else:
                self._show(pieces, before)
            self._text, self._body, self._in_string = rest, [], False
            return True
        keep = _begun(before, OPEN)
        shown, self._text = before[: len(before) - keep], before[len(before) - keep :]
        if self._fresh and _is_gap(shown):
            self._text = before
        else:
            self._show(pieces, shown)
        return False

    def _read_call(self, pieces: list[Piece]) -> bool:
        assert self._body is not None
        text, place = self._text, 0
        while place < len(text):
            if self._in_string:
                place = _IN_STRING.match(text, place).end()  # type: ignore[union-attr]
                if place == len(text) or text[place] != '"':
                    break
                self._in_string = False
                place += 1
                continue
            quote = text.find('"', place)
            end = text.find(CLOSE, place, len(text) if quote < 0 else quote)
            if end >= 0:
                self._body.append(text[:end])
                self._text = text[end + len(CLOSE) :]
                self._finish(pieces, CLOSE)
                return True
            if quote < 0:
                place = len(text) - _begun(text, CLOSE)
                break
            self._in_string = True
            place = quote + 1
        if place:
            self._body.append(text[:place])
        self._text = text[place:]
        return False

    def _finish(self, pieces: list[Piece], closing: str) -> None:
        """The call is complete: `closing` follows it, all of its tag or what there is of it."""
        body, self._body = "".join(self._body or ()), None
        try:
            called = list(_calls(_escaped(body), self._names))
        except (ValueError, RecursionError):
            self._show(pieces, OPEN + body + closing)
            return
        pieces += called
        self.calls += len(called)
        self._gap, self._fresh = "", True

    def _show(self, pieces: list[Piece], text: str) -> None:
        if text := self._gap + text:
            pieces.append(text)
            self._gap, self._fresh = "", False


def _is_gap(text: str) -> bool:
    return _after_space(text, 0) == len(text) <= MAX_GAP


def _begun(text: str, tag: str) -> int:
    """Length of the longest end of the text with which a tag begins."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _escaped(body: str) -> str:
    """JSON has no control characters within strings, but models write them, line ends above all."""
    return _STRING.sub(lambda text: _CONTROL.sub(lambda char: json.dumps(char[0])[1:-1], text[0]), body)


def _calls(body: str, names: Collection[str]) -> Iterator[Called]:
    """Raises ValueError when it is neither a call nor a list of them."""
    place = _after_space(body, 0)
    if body[place : place + 1] != "[":
        yield _call(body, names)
        return
    if not _JSON.raw_decode(body, place)[0]:
        raise ValueError("no calls")
    while body[place] != "]":
        place = _after_space(body, place + 1)
        _, end = _JSON.raw_decode(body, place)
        yield _call(body[place:end], names)
        place = _after_space(body, end)
    if body[place + 1 :].strip():
        raise ValueError("something follows the list")


def _call(text: str, names: Collection[str]) -> Called:
    members: dict[str, str] = {}
    place = _after_space(text, 0)
    if not isinstance(_JSON.decode(text), dict):
        raise ValueError("a call is an object")
    while text[place] != "}":
        place = _after_space(text, place + 1)
        if text[place] == "}":
            break
        key, end = _JSON.raw_decode(text, place)
        place = _after_space(text, _after_space(text, end) + 1)
        _, end = _JSON.raw_decode(text, place)
        if key in members:
            raise ValueError("a name stands twice")
        members[key] = text[place:end]
        place = _after_space(text, end)
    given = [key for key in ARGUMENTS if key in members]
    name = json.loads(members.get("name", "null"))
    if len(given) > 1 or len(members) != 1 + len(given) or not isinstance(name, str) or name not in names:
        raise ValueError("not a call of a tool that there is")
    arguments = members[given[0]] if given else "{}"
    arguments_of(arguments)
    return Called(name, arguments)


def _after_space(text: str, place: int) -> int:
    return _SPACE.match(text, place).end()  # type: ignore[union-attr]
