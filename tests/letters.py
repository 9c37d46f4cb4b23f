"""A vocabulary of the tiny models' size in which most tokens are one ASCII character each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.detokenizer import Detokenizer
from shared.messages import ChatMessage, Tool
from tests.tiny_models import VOCAB

EOS = 2
SEVERAL = {3: b'{"', 4: b'":', 5: b"true"}
TABLE = tuple(SEVERAL.get(token, bytes([token]) if token > EOS else b"") for token in range(VOCAB))
"""The first three stand for nothing, the next for several characters."""


def ids(text: str) -> list[int]:
    return list(text.encode())


def text(tokens: Iterable[int]) -> str:
    return b"".join(TABLE[token] for token in tokens).decode()


class Letters:
    """Stands in for `shared.tokenizer.Tokenizer`."""

    vocab_size = VOCAB
    digest = "letters"
    table = TABLE

    def encode(self, text: str, *, limit: int | None = None) -> list[int]:
        return ids(text)

    def chat(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Tool] | None = None, limit: int | None = None
    ) -> list[int]:
        return [token for message in messages for token in ids(message.content or "")]

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(TABLE)
