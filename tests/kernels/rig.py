"""Runs steps through the kernels beside the codec's own torch code and the float64 reference."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.attention import Features
from shared.engine.codecs.base import LayerShape, PerBlock, PerToken
from shared.engine.codecs.registry import codec_of
from shared.engine.pool import KVPool, Tails
from shared.engine.reference import paged_attention
from shared.engine.span import Span
from shared.kernels.meta import Capacity, StepMeta
from shared.kernels.paged import TritonPaged

CPU = torch.device("cpu")
LAYER = 1
"""Of two: the offset of a layer inside its block must count too."""
LOOKAHEAD = 8


class Rig:
    """Sequences in two pools: one written by kernels, one by the codec.

    Bytes that nobody has written are 0xFF: a NaN, or a scale of NaN, in every codec. So is the tail.
    """

    def __init__(
        self,
        codec: str,
        shape: LayerShape,
        *,
        sequences: int,
        context: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        blocks: int = 0,
    ) -> None:
        """`blocks`: of the pool; sequences live in its last ones, in any order."""
        self.codec, self.shape, self.size, self.dtype = codec_of(codec), shape, block_size, dtype
        each = -(-context // block_size)
        tails = Tails.of(self.codec, sequences, LOOKAHEAD, block_size)
        count = max(blocks, sequences * each)
        self.pool, self.mirror = (
            KVPool([shape] * 2, n, block_size, dtype, CPU, self.codec, tails) for n in (count, sequences * each)
        )
        self._skipped = count - sequences * each  # blocks that the mirror does without
        for pool in (self.pool, self.mirror):
            pool._storage[-sequences * each :].fill_(0xFF)
            pool.layers[LAYER].tail.fill_(torch.nan)
        ids = list(range(sequences * each))
        random.Random(0).shuffle(ids)
        self._tables = [tuple(ids[i * each : (i + 1) * each]) for i in range(sequences)]
        self._keys = [torch.empty(0, shape.kv_heads, shape.k_dim, dtype=dtype) for _ in range(sequences)]
        self._dims = (shape.k_dim, shape.v_dim)
        self._random = torch.Generator().manual_seed(0)

    def step(
        self, shares: Sequence[tuple[int, int]], heads: int, features: Features, capacity: Capacity | None = None
    ) -> float:
        """Continue each (sequence, tokens) of `shares`. The largest difference from the reference, relative to the
        largest number there."""
        lengths = [length for _, length in shares]
        where = [(len(self._keys[i]), i) for i, _ in shares]
        mirrored = [Span((1,) * n, at, self._tables[i], slot=i) for n, (at, i) in zip(lengths, where, strict=True)]
        spans = [Span(s.token_ids, s.start, tuple(b + self._skipped for b in s.table), slot=s.slot) for s in mirrored]
        ring = self.pool.tails.ring
        meta = StepMeta(capacity or Capacity.of(spans, self.size), self.size, CPU, ring)
        meta.load(spans)
        tokens, padded = sum(lengths), meta.capacity.tokens
        query, key = (
            self._randn(heads, padded, self.shape.k_dim),
            self._randn(self.shape.kv_heads, padded, self.shape.k_dim),
        )
        value = self._randn(self.shape.kv_heads, padded, self.shape.v_dim)
        paged = TritonPaged(self.pool, meta)
        got = paged.attend(LAYER, query, key, value, features)
        paged.keep()
        assert got.shape == (padded, heads, self.shape.v_dim) and not got[tokens:].any()

        self._write(mirrored, key.transpose(0, 1)[:tokens], value.transpose(0, 1)[:tokens])
        expected = self._expected(query.transpose(0, 1)[:tokens], mirrored, features)
        return float((got[:tokens].double() - expected).abs().max() / expected.abs().max())

    def begin(self, sequence: int, tokens: int) -> None:
        """Give a sequence that has none yet its first tokens, without kernels."""
        span = Span((1,) * tokens, 0, self._tables[sequence], slot=sequence)
        self._write([span], *(self._randn(self.shape.kv_heads, tokens, n).transpose(0, 1) for n in self._dims))
        self.pool._storage[self._skipped :] = self.mirror._storage
        tails = self.pool.tails
        for position in range(max(0, tokens - tails.ring), tokens) if tails.ring else ():
            row = sequence * tails.ring + position % tails.ring
            self.pool.layers[LAYER].tail[row] = self._keys[sequence][position]

    def rewind(self, sequence: int, count: int) -> None:
        """Forget its last tokens, which were guessed wrongly."""
        self._keys[sequence] = self._keys[sequence][:-count]

    def same_bytes(self) -> bool:
        """Of all blocks in both pools."""
        return torch.equal(self.pool._storage[self._skipped :], self.mirror._storage)

    def _randn(self, *shape: int) -> Tensor:
        """Channels of very different sizes."""
        sizes = torch.logspace(-1, 1, shape[-1]) if shape[0] == self.shape.kv_heads else 1.0
        return (torch.randn(shape, generator=self._random) * sizes).to(self.dtype)

    def _write(self, spans: Sequence[Span], key: Tensor, value: Tensor) -> None:
        views, codec, at = self.mirror.layers[LAYER].views, self.codec, 0
        for span in spans:
            n = len(span.token_ids)
            positions = torch.arange(span.start, span.start + n)
            blocks, offsets = torch.tensor(span.table)[positions // self.size], positions % self.size
            codec.write_values(views, blocks, offsets, value[at : at + n])
            if isinstance(codec, PerToken):
                codec.write_keys(views, blocks, offsets, key[at : at + n])
            self._keys[span.slot] = torch.cat([self._keys[span.slot], key[at : at + n]])
            first, end = span.start // self.size, (span.start + n) // self.size
            if isinstance(codec, PerBlock) and end > first:
                full = self._keys[span.slot][first * self.size : end * self.size]
                codec.seal_keys(views, torch.tensor(span.table[first:end]), full.unflatten(0, (-1, self.size)))
            at += n

    def _expected(self, query: Tensor, spans: Sequence[Span], features: Features) -> Tensor:
        views, every = self.mirror.layers[LAYER].views, torch.arange(self.mirror.blocks)
        keys = self.codec.read_keys(views, every, self.shape, torch.float32)
        values = self.codec.read_values(views, every, self.shape, torch.float32)
        raw = [self._keys[span.slot] for span in spans] if isinstance(self.codec, PerBlock) else None
        return paged_attention(query, spans, keys, values, features, raw)
