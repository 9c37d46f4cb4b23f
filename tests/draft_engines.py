"""Draft models that are right at times only: engines for a drafter, made of the target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shared.engine.base import ModelInfo, Sampled, StepEngine
from shared.engine.span import Span
from shared.messages import Identity


class Guessing:
    """A `StepEngine` that computes nothing and says whatever `say` does."""

    def __init__(self, engine: StepEngine, say: Callable[[], int]) -> None:
        self._engine = engine
        self._say = say

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    @property
    def identity(self) -> Identity:
        return self._engine.identity

    def sample(self, spans: Sequence[Span]) -> list[Sampled]:
        return [Sampled([self._say() for _ in range(span.rows)]) for span in spans]

    def step(self, spans: Sequence[Span]) -> list[list[int]]:
        return [sampled.tokens for sampled in self.sample(spans)]

    def rest(self) -> None:
        self._engine.rest()

    def read_block(self, block: int) -> memoryview:
        return self._engine.read_block(block)

    def landing(self, block: int) -> memoryview | None:
        return self._engine.landing(block)

    def write_block(self, block: int, data: bytes | memoryview) -> None:
        self._engine.write_block(block, data)


class Fallible(Guessing):
    """Says what the engine does, but at each `every`th position."""

    def __init__(self, engine: StepEngine, every: int = 3) -> None:
        super().__init__(engine, lambda: 0)
        self._every = every

    def sample(self, spans: Sequence[Span]) -> list[Sampled]:
        return [self._err(span, sampled) for span, sampled in zip(spans, self._engine.sample(spans), strict=True)]

    def _err(self, span: Span, sampled: Sampled) -> Sampled:
        first = span.start + len(span.token_ids) - span.rows + 1
        tokens = [
            (token + (position % self._every == 0)) % self.info.vocab_size
            for position, token in enumerate(sampled.tokens, start=first)
        ]
        return replace(sampled, tokens=tokens)
