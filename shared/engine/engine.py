"""The engine: a transformers model over a paged KV pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from shared.cores import Cores
from shared.engine.base import BadSpans, ModelInfo, Sampled
from shared.engine.codecs.base import Codec, PerBlock
from shared.engine.codecs.registry import codec_of
from shared.engine.fingerprint import fingerprint, vocabulary_digest
from shared.engine.model import Model, Output, load
from shared.engine.pool import BlockLayout, KVPool, Tails
from shared.engine.runner import Keep, Runner, runner_for
from shared.engine.span import Span
from shared.engine.tails import TailBook
from shared.engine.validate import check
from shared.errors import ConfigError
from shared.messages import Identity
from shared.sampling.logprobs import logprobs
from shared.sampling.sampler import BadLogits, Row, sample

T = TypeVar("T")
Progress = Callable[[str, float], None]
MakeRunner = Callable[[Model, KVPool, int], Runner]
"""Of a model, a pool and how many tokens a sequence may guess."""
MiB = 1 << 20


class Engine:
    """Implements `shared.engine.base.StepEngine`. Not thread-safe: one thread at a time may call it."""

    def __init__(
        self, model: Model, info: ModelInfo, codec: Codec, lookahead: int, runner: MakeRunner = runner_for
    ) -> None:
        self._model = model
        self.info = info
        self.identity = Identity(
            fingerprint=info.fingerprint,
            codec=codec.name,
            block_size=info.block_size,
            block_bytes=info.block_bytes,
            layers=len(model.shapes),
        )
        tails = Tails.of(codec, info.slots, lookahead, info.block_size)
        self._book = TailBook(tails.ring, info.block_size) if tails.ring else None
        self._pool = KVPool(model.shapes, info.kv_blocks, info.block_size, model.dtype, model.device, codec, tails)
        self._runner = runner(model, self._pool, lookahead)
        self._cores: Cores | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        block_size: int = 16,
        kv_blocks: int = 0,
        kv_memory_mb: int = 1024,
        kv_codec: str = "none",
        slots: int = 64,
        lookahead: int = 16,
        layers: int | None = None,
        threads: int = 0,
        cores: Cores | None = None,
        weights: str = "native",
        generates: bool = True,
        progress: Progress | None = None,
    ) -> Engine:
        """The model in `folder` (see `shared.engine.weights.resolve`) with a pool of `kv_blocks` blocks.

        `kv_blocks=0` makes as many as fit into `kv_memory_mb` MiB. `layers` runs only the first layers. `threads`
        sets the whole process's CPU threads for forward passes; 0 leaves them alone, or to `cores`, which are asked
        before each. `weights`: "native", or "int8"
        for linear layers that multiply in 8 bits. A sequence may go back up to `lookahead` tokens that it guessed
        wrongly. `generates`: get ready for steps of a few tokens, which takes a while on a GPU. Raises ModelError,
        ConfigError.
        """
        codec_of(kv_codec)  # before gigabytes are read
        progress = progress or (lambda stage, done: None)
        if threads:
            torch.set_num_threads(threads)
        progress("loading the weights", 0.0)
        if cores:
            cores.at_most(torch.get_num_threads())
        with cores.at_work() if cores else nullcontext():
            model = load(folder, layers, weights, sorted({1, cores.most}) if cores else ())
        progress("hashing the weights", 0.6)
        computed_in = str(model.dtype).removeprefix("torch.") + ("+w8" if weights == "int8" else "")
        engine = cls.of(
            model,
            fingerprint=fingerprint(folder, dtype=computed_in, layers=layers),
            vocabulary=vocabulary_digest(folder),
            block_size=block_size,
            kv_blocks=kv_blocks,
            kv_memory_mb=kv_memory_mb,
            kv_codec=kv_codec,
            slots=slots,
            lookahead=lookahead,
        )
        engine._cores = cores if model.device.type == "cpu" else None
        if generates:
            progress("warming up", 0.9)
            engine.warm_up()
        progress("ready", 1.0)
        return engine

    @classmethod
    def of(
        cls,
        model: Model,
        *,
        fingerprint: str,
        vocabulary: str,
        block_size: int = 16,
        kv_blocks: int = 0,
        kv_memory_mb: int = 1024,
        kv_codec: str = "none",
        slots: int = 64,
        lookahead: int = 16,
        runner: MakeRunner = runner_for,
    ) -> Engine:
        """As `load`, of a model that is in memory. `fingerprint` and `vocabulary`: see `ModelInfo`."""
        codec = codec_of(kv_codec)
        block_bytes = BlockLayout.of(model.shapes, block_size, model.dtype, codec).block_bytes
        info = ModelInfo(
            context_length=model.context_length,
            vocab_size=model.vocab_size,
            eos_ids=model.eos_ids,
            layers=len(model.shapes),
            block_size=block_size,
            block_bytes=block_bytes,
            kv_blocks=kv_blocks or _blocks_within(kv_memory_mb, block_bytes),
            fingerprint=fingerprint,
            vocabulary=vocabulary,
            dtype=str(model.dtype).removeprefix("torch."),
            slots=slots if isinstance(codec, PerBlock) else 0,
            hidden_size=model.hidden_size,
            on_cpu=model.device.type == "cpu",
        )
        return cls(model, info, codec, lookahead, runner)

    def sibling(self, kv_codec: str, kv_blocks: int) -> Engine:
        """Another engine over these weights, with a pool of its own, for one sequence at a time. Raises ConfigError."""
        made = Engine.of(
            self._model,
            fingerprint=self.info.fingerprint,
            vocabulary=self.info.vocabulary,
            block_size=self.info.block_size,
            kv_blocks=kv_blocks,
            kv_codec=kv_codec,
            slots=1,
            lookahead=0,
        )
        made._cores = self._cores
        return made

    def warm_up(self) -> None:
        """Do now what would make the first steps slow."""
        with torch.inference_mode():
            self._runner.warm_up()

    def sample(self, spans: Sequence[Span]) -> list[Sampled]:
        """Per span the `rows` tokens that follow its last `rows` positions. See `StepEngine.sample`."""
        (logits, hidden), keep = self._forward(spans)
        try:
            tokens = sample(logits, [row for span in spans for row in _rows(span)])
        except BadLogits as error:
            owners = [i for i, span in enumerate(spans) for _ in range(span.rows)]
            raise BadSpans(tuple(sorted({owners[row] for row in error.rows}))) from None
        scores = logprobs(logits, tokens, [span.logprobs for span in spans for _ in range(span.rows)])
        states = _states(hidden, [span.hidden for span in spans for _ in range(span.rows)])
        self._done(spans, keep)
        ends = list(accumulate(span.rows for span in spans))
        parts = [slice(end - span.rows, end) for span, end in zip(spans, ends, strict=True)]
        return [Sampled(tokens[part], _told(scores[part]), _told(states[part])) for part in parts]

    def step(self, spans: Sequence[Span]) -> list[list[int]]:
        """See `StepEngine.step`."""
        return [sampled.tokens for sampled in self.sample(spans)]

    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Logits of the rows asked for, [sum of rows, vocab] float32, in the order of the spans.

        Raises RequestError (or a kind of it) for spans that cannot be run, before anything is computed.
        """
        output, keep = self._forward(spans)
        self._done(spans, keep)
        return output.logits.clone()

    def _forward(self, spans: Sequence[Span]) -> tuple[Output, Keep]:
        if not spans:
            none = torch.empty(0, self.info.vocab_size, device=self._model.device)
            return Output(none, none), lambda: None
        check(spans, self.info)
        if self._book:
            self._book.check(spans)
        for block in _begun_unfilled(spans, self.info.block_size):
            self._pool.clear(block)
        with torch.inference_mode(), self._threads():
            return self._runner.run(spans)

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """As many as there are cores for, for this step."""
        if self._cores is None:
            yield
            return
        with self._cores.at_work() as count:
            torch.set_num_threads(count)
            yield

    def rest(self) -> None:
        """See `StepEngine.rest`."""
        if self._cores:
            self._cores.rest()

    def _done(self, spans: Sequence[Span], keep: Keep) -> None:
        """The step has succeeded."""
        with torch.inference_mode():
            keep()
        if self._book:
            self._book.wrote(spans)

    def read_block(self, block: int) -> memoryview:
        """See `StepEngine.read_block`."""
        return self._pool.block(block)

    def landing(self, block: int) -> memoryview | None:
        """See `StepEngine.landing`: on a GPU there is none."""
        return self._pool.landing(block)

    def write_block(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """See `StepEngine.write_block`."""
        self._pool.write(block, data)


def _rows(span: Span) -> Iterator[Row]:
    """How each token that the span asks for is chosen."""
    length = len(span.token_ids)
    for index in range(length - span.rows, length):
        guessed = span.token_ids[length - span.guesses : index + 1] if span.adjustments else ()
        mask = None if span.masks is None else span.masks[index - length + span.rows]
        yield Row(span.sampling, span.seed, span.start + index + 1, span.adjustments, guessed, mask)


def _states(hidden: Tensor, wanted: Sequence[bool]) -> list[bytes | None]:
    """What is told of the `hidden` states [rows, hidden_size] of the rows that are `wanted`."""
    if not any(wanted) or not hidden.shape[1]:
        return [None] * len(wanted)
    largest = torch.finfo(torch.float16).max
    rows = hidden.float().clamp(-largest, largest).to(torch.float16).cpu().numpy().astype("<f2", copy=False)
    return [row.tobytes() if asked else None for row, asked in zip(rows, wanted, strict=True)]


def _told(values: Sequence[T | None]) -> list[T] | None:
    """Of a span's rows; None if it did not ask."""
    return [value for value in values if value is not None] or None


def _blocks_within(memory_mb: int, block_bytes: int) -> int:
    blocks = memory_mb * MiB // block_bytes
    if blocks < 1:
        raise ConfigError(f"one KV block takes {block_bytes} bytes, more than {memory_mb} MiB", field="kv_memory_mb")
    return blocks


def _begun_unfilled(spans: Sequence[Span], block_size: int) -> list[int]:
    """Blocks whose first position is in a span that ends before their last."""
    ends = [(span, span.start + len(span.token_ids)) for span in spans]
    return [
        span.table[end // block_size] for span, end in ends if end % block_size and end - end % block_size >= span.start
    ]
