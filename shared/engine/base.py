"""What services need from an engine. No torch: schedulers, services and tests' fakes are written against this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.engine.span import Span
from shared.errors import TrineError
from shared.messages import Identity
from shared.sampling.fields import Logprob


class BadSpans(TrineError):
    """The logits for `spans` (indices into those given) have no finite maximum, so no token was chosen.

    Their KV is unusable. The other spans can be stepped again as they are.
    """

    def __init__(self, spans: tuple[int, ...]) -> None:
        super().__init__(f"the model's output is not finite for spans {list(spans)[:8]}")
        self.spans = spans


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model that never change while it runs."""

    context_length: int
    """Most positions a sequence may have, prompt and completion together."""
    vocab_size: int
    """Token ids are 0 .. vocab_size - 1."""
    eos_ids: frozenset[int]
    layers: int
    block_size: int
    """Tokens per KV block."""
    block_bytes: int
    """Bytes of one KV block, all layers together."""
    kv_blocks: int
    """Blocks in the pool; their ids are 0 .. kv_blocks - 1."""
    fingerprint: str
    """Digest of all that determines the bytes of a block, apart from codec, block size and tokens."""
    vocabulary: str
    """Digest of the tokenizer's vocabulary."""
    dtype: str
    """Of weights and KV: "float32" or "bfloat16"."""
    slots: int = 0
    """Sequences that may be under way at once, where the KV codec keeps something of each (see `Span.slot`); 0: any."""
    hidden_size: int = 0
    """Channels of a hidden state as the LM head reads it; 0: none can be reported."""
    on_cpu: bool = False
    """Each token of a step takes its time; on a GPU a step of few takes about as long as one of some hundred."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step chose for a span."""

    tokens: list[int]
    logprobs: list[Logprob] | None = None
    """Of these tokens, if the span asked for them."""
    hidden: list[bytes] | None = None
    """The hidden states that these tokens were chosen from, if the span asked for them and the model tells: what the LM
    head read (so after the final norm), each [hidden_size] as float16, little-endian, finite."""


class StepEngine(Protocol):
    """Runs forward passes over spans. Not thread-safe: one thread steps, reads blocks and writes them."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def identity(self) -> Identity: ...

    def sample(self, spans: Sequence[Span]) -> list[Sampled]:
        """One forward pass over all spans; for each, the `span.rows` tokens chosen after its last `rows` positions.

        Blocking. The KV of all tokens given is in the spans' blocks afterwards. Raises RequestError for a span that
        cannot be run (nothing is computed then); after any error the engine can be used again, but the blocks of the
        spans given hold undefined values at and after each span's start. Raises BadSpans when some have no usable
        output, or when their adjustments leave no token to choose.
        """
        ...

    def step(self, spans: Sequence[Span]) -> list[list[int]]:
        """As `sample`, but the tokens alone."""
        ...

    def rest(self) -> None:
        """There is nothing to compute for now: others on this machine may have the cores at once."""
        ...

    def read_block(self, block: int) -> memoryview:
        """The bytes of a block, read-only and zero-copy: valid until the block is written again."""
        ...

    def landing(self, block: int) -> memoryview | None:
        """The block's bytes, writable: what is written there is the block. None where that is not possible."""
        ...

    def write_block(self, block: int, data: bytes | memoryview) -> None:
        """Overwrite a block. Raises FrameError when `data` is not exactly `block_bytes` long."""
        ...
