"""An engine without a model: its KV is the tokens themselves, so a wrong block gives a wrong answer.

The next token is a hash of all tokens up to there, as read through the block table from the pool. Whatever moves
blocks about (caches, transfers, preemption) must move the right bytes to the right place for the text to come out.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shared.engine.base import ModelInfo, Sampled
from shared.engine.span import Span
from shared.engine.validate import check
from shared.errors import FrameError, InvalidField
from shared.messages import ChatMessage, Identity, Tool
from shared.sampling.fields import Logprob
from shared.sampling.guide import Masks

VOCAB = 1000
HIDDEN = 4
"""Channels of a hidden state."""
EMPTY = 2**32 - 1


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """What the fake model says after `tokens`. Repeats now and then, so that prompt lookup finds something."""
    if len(tokens) > 24 and (len(tokens) // 12) % 2:
        return int(tokens[len(tokens) - 24])
    digest = hashlib.blake2b(np.asarray([seed, *tokens], dtype="<u8").tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def completion(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The right answer: `count` tokens after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def logprob(token: int, top: int) -> Logprob:
    """What the fake engine says of a token, and of those below it."""
    ids = list(range(token, max(token - top, -1), -1))
    return Logprob(logprob=-token / VOCAB, top_ids=ids, top_logprobs=[-i / VOCAB for i in ids])


def hidden_state(position: int, token: int, channels: int = HIDDEN) -> bytes:
    """What the fake engine reports of the `token` that it chose for `position`."""
    known = [position // 1000, position % 1000, token // 1000, token % 1000]
    return np.resize(np.asarray(known, dtype="<f2"), channels).tobytes()


def allowed(mask: Masks, token: int) -> int:
    """The first token from `token` on, round the vocabulary, that the mask lets through."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    return int((np.flatnonzero(np.roll(bits, -token))[0] + token) % VOCAB)


class FakeEngine:
    """Implements `StepEngine`. `seeded`: answers depend on the span's seed, as sampling does.

    `weights` other than 0 are another model: other KV for the same tokens, and other answers (`completion` with them
    for a seed).
    """

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 4,
        context: int = 512,
        step_s: float = 0.0,
        seeded: bool = False,
        fingerprint: str = "fake-weights",
        codec: str = "none",
        wrong_every: int = 0,
        weights: int = 0,
    ) -> None:
        self._pool = np.full((blocks, block_size), EMPTY, dtype="<u4")
        self._step_s = step_s
        self._seeded = seeded
        self._wrong_every = wrong_every
        self._weights = weights
        self._lock = threading.Lock()
        self._codec = codec
        self.steps = 0
        self.rested_after: list[int] = []  # so many steps
        self.tokens_computed = 0
        self.poison: int | None = None  # a token that makes the step raise
        self.info = ModelInfo(
            context_length=context,
            vocab_size=VOCAB,
            eos_ids=frozenset(),
            layers=1,
            block_size=block_size,
            block_bytes=4 * block_size,
            kv_blocks=blocks,
            fingerprint=fingerprint,
            vocabulary="fake-vocabulary",
            dtype="float32",
            hidden_size=HIDDEN,
        )

    @property
    def identity(self) -> Identity:
        info = self.info
        return Identity(
            fingerprint=info.fingerprint, codec=self._codec, block_size=info.block_size, block_bytes=info.block_bytes
        )

    def with_eos(self, *ids: int) -> FakeEngine:
        self.info = replace(self.info, eos_ids=frozenset(ids))
        return self

    def sample(self, spans: Sequence[Span]) -> list[Sampled]:
        """With log-probabilities and hidden states that tell the token: see `logprob`, `hidden_state`."""
        return [self._sampled(span, tokens) for span, tokens in zip(spans, self.step(spans), strict=True)]

    def _sampled(self, span: Span, tokens: list[int]) -> Sampled:
        end = span.start + len(span.token_ids)
        places = range(end - span.rows + 1, end + 1)
        scores = None if span.logprobs is None else [logprob(token, span.logprobs) for token in tokens]
        states = [
            hidden_state(place, token, self.info.hidden_size) for place, token in zip(places, tokens, strict=True)
        ]
        return Sampled(tokens, scores, states if span.hidden and states else None)

    def step(self, spans: Sequence[Span]) -> list[list[int]]:
        check(spans, self.info)
        if not self._lock.acquire(blocking=False):
            raise AssertionError("two steps at once")
        try:
            if self._step_s:
                time.sleep(self._step_s)
            self.steps += 1
            if self.poison is not None and any(self.poison in s.token_ids for s in spans):
                raise RuntimeError("poisoned span")
            return [self._span(s) for s in spans]
        finally:
            self._lock.release()

    def _span(self, span: Span) -> list[int]:
        size = self.info.block_size
        self.tokens_computed += len(span.token_ids)
        for position, token in enumerate(span.token_ids, start=span.start):
            self._pool[span.table[position // size], position % size] = token ^ self._weights
        end = span.start + len(span.token_ids)
        read = np.concatenate([self._pool[b] for b in span.table])[:end]
        if (read == EMPTY).any():
            raise AssertionError("a position was read that nobody has written")
        read = read ^ self._weights
        seed = span.seed if self._seeded else self._weights
        out: list[int] = []
        for row in range(end - span.rows + 1, end + 1):
            token = next_token([int(t) for t in read[:row]], seed)
            wrong = self._wrong_every and row % self._wrong_every == 0
            token = (token + 1) % VOCAB if wrong else token
            out.append(token if span.masks is None else allowed(span.masks[len(out)], token))
        return out

    def rest(self) -> None:
        self.rested_after.append(self.steps)

    def read_block(self, block: int) -> memoryview:
        return memoryview(self._pool[block].tobytes())

    def landing(self, block: int) -> memoryview:
        return self._pool[block].data.cast("B")

    def write_block(self, block: int, data: bytes | memoryview) -> None:
        if len(data) != self.info.block_bytes:
            raise FrameError(f"{len(data)} bytes for a block of {self.info.block_bytes}")
        self._pool[block] = np.frombuffer(data, dtype="<u4")


class FakeTokenizer:
    """Text is token ids in decimal; "" is no token. Stands in for `shared.tokenizer.Tokenizer`."""

    vocab_size = VOCAB
    digest = "fake-vocabulary"
    table = tuple(f"{token} ".encode() for token in range(VOCAB))

    def encode(self, text: str, *, limit: int | None = None) -> list[int]:
        return [int(word) % VOCAB for word in text.split()]

    def chat(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Tool] | None = None, limit: int | None = None
    ) -> list[int]:
        if tools:
            raise InvalidField("tools: this model's chat template has no place for them", field="tools")
        return [token for m in messages for token in self.encode(m.content or "")]

    def detokenizer(self) -> FakeTokenizer:
        return self

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""
