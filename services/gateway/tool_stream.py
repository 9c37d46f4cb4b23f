"""One choice's text as deltas of a message that may call tools, in OpenAI's shape. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from services.gateway.sse import Position
from services.gateway.tool_calls import Called, Piece, ToolCallParser
from trine.merge import Delta


class ToolStream:
    """Feed all of the answer, from its first token on; what the client has already is told to nobody again."""

    def __init__(self, names: Collection[str], choice_id: str, have: Position) -> None:
        """`names`: of the tools that were offered. `choice_id` makes the ids of calls, the same each time."""
        self._parser = ToolCallParser(names)
        self._choice_id = choice_id
        self._have = replace(have)
        self._told = 0

    @property
    def called(self) -> bool:
        return self._parser.calls > 0

    def take(self, delta: Delta) -> tuple[Delta, dict[str, Any]]:
        """What of it is new, and the message's delta that it brings, which may be empty.

        It is one delta: a client that has it has all of the piece, and one that has not hears all of it again.
        """
        known = min(self._have.characters, len(delta.text))
        self._have.characters -= known
        skipped = min(max(self._have.tokens - delta.index, 0), len(delta.token_ids))
        self._delta(self._parser.push(delta.text[:known]))
        told = self._delta(self._parser.push(delta.text[known:]))
        new = Delta(delta.text[known:], delta.token_ids[skipped:], delta.index + skipped, delta.logprobs[skipped:])
        return new, told

    def end(self) -> dict[str, Any]:
        """The delta that is left when there is no more text."""
        return self._delta(self._parser.end())

    def _delta(self, pieces: list[Piece]) -> dict[str, Any]:
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls: list[dict[str, Any]] = []
        for called in pieces:
            if isinstance(called, Called):
                calls.append({"index": self._told, **_call(called, self._choice_id, self._told)})
                self._told += 1
        return {**({"content": content} if content else {}), **({"tool_calls": calls} if calls else {})}


def message_of(text: str, names: Collection[str], choice_id: str) -> dict[str, Any]:
    """The whole message that a text is: `content` is null where it only calls tools."""
    parser = ToolCallParser(names)
    pieces = [*parser.push(text), *parser.end()]
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    called = [piece for piece in pieces if isinstance(piece, Called)]
    if not called:
        return {"role": "assistant", "content": content, "refusal": None}
    calls = [_call(piece, choice_id, index) for index, piece in enumerate(called)]
    return {"role": "assistant", "content": content or None, "refusal": None, "tool_calls": calls}


def _call(called: Called, choice_id: str, index: int) -> dict[str, Any]:
    digest = hashlib.blake2b(f"{choice_id}/{index}".encode(), digest_size=12).hexdigest()
    function = {"name": called.name, "arguments": called.arguments}
    return {"id": f"call_{digest}", "type": "function", "function": function}
