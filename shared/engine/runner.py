"""How a step's forward pass is made: over plain torch, or over Triton's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from shared.engine.attention import Paged, attending
from shared.engine.batch import build
from shared.engine.model import Model, Output
from shared.engine.pool import KVPool
from shared.engine.span import Span

Keep = Callable[[], None]
"""To be called when the step has succeeded, not before, so that a failed one can be repeated."""


class Runner(Protocol):
    """Writes the KV of valid spans (at least one) into the pool."""

    def run(self, spans: Sequence[Span]) -> tuple[Output, Keep]:
        """Of the rows asked for, in the order of the spans. It may change with the next call."""
        ...

    def warm_up(self) -> None:
        """Do what would make the first steps slow."""
        ...


class TorchRunner:
    """Runs anywhere."""

    def __init__(self, model: Model, pool: KVPool) -> None:
        self._model, self._pool = model, pool

    def run(self, spans: Sequence[Span]) -> tuple[Output, Keep]:
        batch = build(spans, self._pool.block_size, self._model.device, self._pool.tails.ring)
        paged = Paged(self._pool, batch)
        with attending(paged):
            return self._model.forward(batch.token_ids, batch.positions, batch.rows), paged.keep

    def warm_up(self) -> None:
        pass


def runner_for(model: Model, pool: KVPool, lookahead: int) -> Runner:
    """The one for the model's device. A sequence has up to 1 + `lookahead` tokens in a decode step."""
    if model.device.type != "cuda":
        return TorchRunner(model, pool)
    from shared.engine.graphs import TritonRunner

    return TritonRunner(model, pool, lookahead)
