"""The engine's steps over Triton's kernels: of fixed capacity, so that decode steps replay as CUDA graphs.

A decode step of a large model is hundreds of short kernels, and launching them one by one takes longer than running
them. All that differs from step to step is in `StepMeta`, at fixed addresses: a step of some capacity is captured once
and replayed with new contents. What does not fill it is padding that reads and writes no one's blocks. Other steps
(chunks of prompts, very large batches) run as they come: launching is a small part of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from shared.engine.attention import attending
from shared.engine.model import Model, Output
from shared.engine.pool import KVPool
from shared.engine.runner import Keep
from shared.engine.span import Span
from shared.kernels.meta import Capacity, StepMeta
from shared.kernels.paged import TritonPaged
from shared.kernels.tiling import SHORT

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Tokens of a step. Reading the weights takes longer than computing a few tokens too many."""
_LEAST_BLOCKS, _LEVEL = 16, 4
"""Longest contexts, in blocks: each four times the one before. Programs beyond a sequence's end return at once."""
_WARM_UP_S = 30.0


class StaticStep:
    """A step of up to `capacity`, whose tensors stay where they are. Runs eagerly anywhere that kernels do."""

    def __init__(self, model: Model, pool: KVPool, capacity: Capacity) -> None:
        self._model, self._pool = model, pool
        self.meta = StepMeta(capacity, pool.block_size, model.device, pool.tails.ring)
        self._sink = TritonPaged(pool, self.meta)

    def load(self, spans: Sequence[Span]) -> None:
        """What the next `forward` computes. Nothing waits for the device."""
        self.meta.load(spans)

    def forward(self) -> Output:
        """Of `capacity.rows`; what padded ones hold means nothing. Nothing waits for the device."""
        self._sink = TritonPaged(self._pool, self.meta)
        with attending(self._sink):
            return self._model.forward(self.meta.token_ids, self.meta.positions, self.meta.rows)

    def keep(self) -> None:
        """The last `forward` has succeeded."""
        self._sink.keep()


@dataclass(frozen=True, slots=True)
class Shapes:
    """Which capacities are captured. `queries`: most tokens of a sequence; `blocks`: of its context. Both ascend."""

    queries: tuple[int, ...]
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, longest: int, lookahead: int) -> Shapes:
        """For contexts of up to `longest` blocks. One shape for steps without guesses and one for those with."""
        blocks = [_LEAST_BLOCKS]
        while blocks[-1] < longest:
            blocks.append(blocks[-1] * _LEVEL)
        return cls((1,) if lookahead == 0 else (1, min(1 + lookahead, SHORT)), tuple(blocks))

    def fitting(self, spans: Sequence[Span], block_size: int) -> Capacity | None:
        """The smallest that `spans` fit into, if they fit into one."""
        need = Capacity.of(spans, block_size)
        tokens = next((n for n in SIZES if n >= need.tokens), None)
        queries = next((n for n in self.queries if n >= need.queries), None)
        blocks = next((n for n in self.blocks if n >= need.blocks), None)
        return None if tokens is None or queries is None or blocks is None else _capacity(tokens, queries, blocks)

    def all(self) -> list[Capacity]:
        """Short contexts first."""
        return [_capacity(n, queries, blocks) for blocks in self.blocks for queries in self.queries for n in SIZES]


def _capacity(tokens: int, queries: int, blocks: int) -> Capacity:
    return Capacity(tokens=tokens, sequences=tokens, queries=queries, blocks=blocks, rows=tokens)


class CapturedStep:
    """A static step as a CUDA graph. Capturing runs `spans` several times, to the same end."""

    def __init__(self, step: StaticStep, spans: Sequence[Span], sealed: bool, output: Output, memory: Any) -> None:
        """`output`, of the step's rows, and `memory` are shared by all graphs: only one runs at a time, and its
        results are used before the next one."""
        self._step, self._output = step, output
        step.load(spans)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels and makes workspaces, which must not happen while capturing
            step.forward()
            if sealed:  # early, but the tail has room for a whole step beyond what its repetition would need
                step.keep()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = _captured(self._forward, memory)
        self._keeping = _captured(step.keep, memory) if sealed else None

    def _forward(self) -> None:
        for kept, made in zip(self._output, self._step.forward(), strict=True):
            kept.copy_(made)

    def run(self, spans: Sequence[Span]) -> Output:
        self._step.load(spans)
        self._graph.replay()
        return self._output

    def keep(self) -> None:
        if self._keeping is not None:
            self._keeping.replay()


def _captured(work: Callable[[], object], memory: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.stream(torch.cuda.current_stream()),  # to come back to: a capture that fails leaves its own behind
        torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"),  # others may use the device meanwhile
    ):
        work()
    return graph


class TritonRunner:
    """Implements `shared.engine.runner.Runner`. All work is queued on the current stream; so is what copies blocks from
    or to the pool, which therefore sees steps as done that were queued before."""

    def __init__(self, model: Model, pool: KVPool, lookahead: int, *, graphs: bool = True) -> None:
        self._model, self._pool = model, pool
        longest = min(-(-model.context_length // pool.block_size), pool.blocks)
        self._shapes = Shapes.of(longest, lookahead) if graphs else None
        self._captured: dict[Capacity, CapturedStep] = {}
        self._output: Output | None = None
        self._memory: Any = None

    def run(self, spans: Sequence[Span]) -> tuple[Output, Keep]:
        captured = self._step_for(spans)
        if captured is None:
            step = StaticStep(self._model, self._pool, Capacity.of(spans, self._pool.block_size))
            step.load(spans)
            return step.forward(), step.keep
        return _first(captured.run(spans), sum(span.rows for span in spans)), captured.keep

    def warm_up(self) -> None:
        """Capture what there is time for; the rest is captured when it is first needed. Writes into block 0, so this is
        for an empty pool."""
        deadline = time.monotonic() + _WARM_UP_S
        token = Span((0,), 0, (0,), 1)
        for capacity in self._shapes.all() if self._shapes else ():
            if time.monotonic() > deadline or self._capture(capacity, [token]) is None:
                return

    def _step_for(self, spans: Sequence[Span]) -> CapturedStep | None:
        capacity = self._shapes.fitting(spans, self._pool.block_size) if self._shapes else None
        return None if capacity is None else self._capture(capacity, spans)

    def _capture(self, capacity: Capacity, spans: Sequence[Span]) -> CapturedStep | None:
        """None if the model cannot be captured, as where it looks at its own numbers on the host."""
        if capacity not in self._captured:
            try:
                self._captured[capacity] = self._graph_of(StaticStep(self._model, self._pool, capacity), spans)
            except RuntimeError as error:
                structlog.get_logger().warning("CUDA graphs are off: the model cannot be captured", error=str(error))
                self._shapes = None
                return None
        return self._captured[capacity]

    def _graph_of(self, step: StaticStep, spans: Sequence[Span]) -> CapturedStep:
        if self._output is None or self._memory is None:
            self._output = _buffers(self._model, SIZES[-1])
            self._memory = torch.cuda.graph_pool_handle()
        output = _first(self._output, step.meta.capacity.rows)
        return CapturedStep(step, spans, self._pool.tails.ring > 0, output, self._memory)


def _buffers(model: Model, rows: int) -> Output:
    logits = torch.empty(rows, model.vocab_size, device=model.device)
    return Output(logits, torch.empty(rows, model.hidden_size, dtype=model.dtype, device=model.device))


def _first(output: Output, rows: int) -> Output:
    return Output(*(tensor[:rows] for tensor in output))
