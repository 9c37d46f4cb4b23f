"""A fake engine that is as strict about slots as one whose KV codec seals whole blocks, and that can fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shared.engine.span import Span
from shared.engine.tails import TailBook
from tests.fake_engine import FakeEngine

GARBAGE = 999_999


class SealedEngine(FakeEngine):
    """Refuses a span that begins inside a block whose earlier keys its slot does not hold."""

    def __init__(self, *, blocks: int, block_size: int, slots: int, lookahead: int, context: int = 512) -> None:
        super().__init__(blocks=blocks, block_size=block_size, context=context)
        self.info = replace(self.info, slots=slots)
        self._book = TailBook(lookahead + block_size, block_size)

    def step(self, spans: Sequence[Span]) -> list[list[int]]:
        self._book.check(spans)
        tokens = super().step(spans)
        self._book.wrote(spans)
        return tokens

    def fail(self, spans: Sequence[Span]) -> None:
        """A step that breaks off: what it was to write is undefined."""
        for span in spans:
            for position in range(span.start, span.start + len(span.token_ids)):
                self._pool[span.table[position // self.info.block_size], position % self.info.block_size] = GARBAGE

    def block(self, block: int) -> list[int]:
        return [int(token) for token in self._pool[block]]

    def load(self, block: int, tokens: Sequence[int]) -> None:
        self._pool[block] = tokens
