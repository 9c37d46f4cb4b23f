"""Reading an answer as it comes."""

from __future__ import annotations

from collections.abc import Sequence

from trine.completion import Completion
from trine.stream import Stream


async def consume(stream: Stream) -> Completion:
    """All of it: no token missing or doubled, the deltas' text is the answer's."""
    tokens, text = 0, ""
    async for delta in stream:
        assert delta.index == tokens, "a token is missing or doubled"
        tokens += len(delta.token_ids)
        text += delta.text
    assert len(stream.completion.token_ids) == tokens
    assert stream.completion.text == text
    return stream.completion


def words(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)
