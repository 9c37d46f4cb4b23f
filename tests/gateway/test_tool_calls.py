"""Calls of tools in a model's text: what is a call, what is content, and that cuts make no difference."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.sse import Position
from services.gateway.tool_calls import CLOSE, MAX_GAP, OPEN, Called, Piece, ToolCallParser
from services.gateway.tool_stream import ToolStream
from trine.merge import Delta

NAMES = ("f", "get_weather")
CALL = OPEN + '\n{"name": "f", "arguments": {"a": 1}}\n' + CLOSE
SPACE = "\n" * (MAX_GAP + 1)
F = Called("f", '{"a": 1}')
BITS = st.sampled_from(
    [OPEN, CLOSE, CALL, "<", "<tool", "_call>", "{", "}", "[", "]", '"', "\\", '\\"', " ", "\n", SPACE, SPACE[2:],
     "text", ",", ":", "é", '{"name": "f"', ', "arguments": {', '"</tool_call>"',
     '{"name": "f", "arguments": {"s": "</tool_call> \\" "}}']
)  # fmt: skip
TEXTS = st.lists(BITS, max_size=14).map("".join)


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring texts as one."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


def parse(*parts: str, end: bool = True) -> list[Piece]:
    parser = ToolCallParser(NAMES)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return joined(pieces + (parser.end() if end else []))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        (" \n", [" \n"]),
        (CALL, [F]),
        (f"\n{CALL}\n{CALL}\n", [F, F]),
        (f"Let me see.\n{CALL}", ["Let me see.\n", F]),
        (f"{CALL}\nDone.", [F, "\nDone."]),
        (f"a {CALL} b {CALL} ", ["a ", F, " b ", F]),
        (f"{CALL}{SPACE}{CALL}{SPACE}", [F, SPACE, F, SPACE]),
        (f"{SPACE}{OPEN}{SPACE}{{", [f"{SPACE}{OPEN}{SPACE}{{"]),
        (CALL.removesuffix(CLOSE), [F]),
        (CALL.removesuffix("call>"), [F]),
        (f'{OPEN}[{{"name":"f","arguments":{{"a": 1}}}}, {{"name":"f"}}]{CLOSE}', [F, Called("f", "{}")]),
        (f'{OPEN}{{"parameters": {{"a": 1}}, "name": "f"}}{CLOSE}', [F]),
        (f'{OPEN}{{"name": "f", "arguments": {{"x": "{CLOSE}\\"{CLOSE}"}}}}{CLOSE}',
         [Called("f", f'{{"x": "{CLOSE}\\"{CLOSE}"}}')]),
        (f'{OPEN}{{"name": "f", "arguments": {{"n": 1.10, "b": 12345678901234567890123}}}}{CLOSE}',
         [Called("f", '{"n": 1.10, "b": 12345678901234567890123}')]),
        (f'{OPEN}\n{{\t"name": "f", "arguments": {{"s": "a\n\\n\tb\0", "t":\t1}}}}{CLOSE}',
         [Called("f", '{"s": "a\\n\\n\\tb\\u0000", "t":\t1}')]),
    ],
)  # fmt: skip
def test_calls(text: str, wanted: list[Piece]) -> None:
    assert parse(text) == wanted


@pytest.mark.parametrize(
    "body",
    [
        "",
        "hello",
        "[]",
        "{",
        '{"name": "other", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "\\\n"}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {}, "more": 1}',
        '{"name": "f", "name": "f", "arguments": {}}',
        '{"name": "f", "arguments": {}} {}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": ' + '{"a":' * 40 + "1" + "}" * 41,
        "[" * 100_000,
        '[{"name": "f"}, 1]',
    ],
)
def test_what_is_no_call_is_content_with_its_tags(body: str) -> None:
    for text in (f"x {OPEN}{body}{CLOSE} y", f" {OPEN}{body}"):
        assert parse(text) == [text]
        assert parse(f"{text}{CALL}")[0] != F  # and what follows a text is none of its business


def test_text_is_shown_as_soon_as_it_cannot_be_a_call() -> None:
    assert parse("a <tool", end=False) == ["a "]
    assert parse("a <tools", end=False) == ["a <tools"]
    assert parse(f"a {OPEN} s", end=False) == [f"a {OPEN} s"]
    assert parse(f"{CALL}\n", end=False) == [F]
    assert parse(CALL[:-1], end=False) == []


@given(TEXTS, st.lists(st.integers(0, 4000), max_size=6))
def test_any_cut_gives_the_same_as_the_text_so_far_gives(text: str, places: list[int]) -> None:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    parts = [text[a:b] for a, b in pairwise(edges)]
    for count in range(len(parts) + 1):
        assert parse(*parts[:count], end=False) == parse("".join(parts[:count]), end=False)
    assert parse(*parts) == parse(text) == parse(*text)


@given(TEXTS)
@example(f"{CALL}_call>")
def test_no_text_is_lost(text: str) -> None:
    rest, called = text, False
    for piece in parse(text):
        if isinstance(piece, str):
            # The same text may stand in the tag that ends a call, which is not shown.
            before, found, rest = (rest.partition(CLOSE)[2] if called else rest).partition(piece)
            called = False
            assert found
        else:
            written = piece.arguments.replace("\\n", "\n")
            before, found, rest = rest.partition(written if written != "{}" else "}")
            assert found
            json.loads(piece.arguments)
            before, called = "", True  # the rest of a call
        assert not before.strip(" \n\t]}") or CLOSE in before


@given(TEXTS, st.lists(st.integers(1, 9), max_size=9), st.integers(0, 200))
@example(f"a{CALL}{CALL}", [3], len(CALL) + 1)
def test_who_goes_on_hears_the_rest(text: str, sizes: list[int], place: int) -> None:
    """A client that has so many characters, of a stream that was cut otherwise then."""
    place %= len(text) + 1
    whole = ToolStream(NAMES, "x/0", Position())
    first = [whole.take(Delta(text[:place], (), 0))[1], whole.take(Delta(text[place:], (), 0))[1], whole.end()]
    again = ToolStream(NAMES, "x/0", Position(characters=place))
    later: list[dict[str, Any]] = []
    start = 0
    for size in [*sizes, len(text)]:
        later.append(again.take(Delta(text[start : start + size], (), 0))[1])
        start += size
    later.append(again.end())
    assert told(first[:1]) + told(later) == told(first)


def told(deltas: list[dict[str, Any]]) -> str:
    """All that they say, ids included."""
    said = ""
    for delta in deltas:
        said += delta.get("content", "") + "".join(f"<{json.dumps(call)}>" for call in delta.get("tool_calls", []))
    return said
