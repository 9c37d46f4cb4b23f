"""Paged attention against the float64 reference, on ragged batches over scattered blocks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.engine.attention import Features, Paged
from shared.engine.batch import TILE, Batch, build
from shared.engine.codecs.base import LayerShape, PerBlock, PerToken
from shared.engine.codecs.none import Raw
from shared.engine.codecs.registry import CODECS
from shared.engine.pool import KVPool, Tails
from shared.engine.reference import paged_attention
from shared.engine.span import Span

CPU = torch.device("cpu")
B = 16
NAN = b"\xff"
"""As bytes of any codec: of floating-point numbers or scales they make NaN."""


def spans_over(shapes: list[tuple[int, int]], blocks: int, seed: int = 0, block_size: int = B) -> list[Span]:
    """Spans of (start, length) whose tables are disjoint and scattered over the pool."""
    free = list(range(blocks))
    random.Random(seed).shuffle(free)
    spans = []
    for start, length in shapes:
        table = tuple(free.pop() for _ in range(-(-(start + length) // block_size)))
        spans.append(Span((1,) * length, start, table))
    return spans


def difference(
    spans: list[Span],
    shape: LayerShape,
    heads: int,
    features: Features,
    *,
    codec: str = "none",
    block_size: int = B,
    seed: int = 0,
) -> float:
    """Largest difference from the reference, which is given what the codec made of keys and values.

    What no span may read is NaN: blocks of others, blocks that the step fills, and the tail but for each span's rows.
    """
    torch.manual_seed(seed)
    spans = [replace(span, slot=slot) for slot, span in enumerate(spans)]
    tails = Tails.of(CODECS[codec], len(spans), 5, block_size)
    blocks = 1 + max(b for s in spans for b in s.table)
    pool = KVPool([shape], blocks, block_size, torch.float32, CPU, CODECS[codec], tails)
    layer = pool.layers[0]
    for block in range(blocks):
        pool.write(block, NAN * pool.block_bytes)
    layer.tail.fill_(torch.nan)
    past = [_past(pool, span) for span in spans]
    batch = build(spans, block_size, CPU, tails.ring)
    tokens = len(batch.token_ids)
    q = torch.randn(heads, tokens, shape.k_dim)
    k = torch.randn(shape.kv_heads, tokens, shape.k_dim)
    v = torch.randn(shape.kv_heads, tokens, shape.v_dim)
    got = Paged(pool, batch).attend(0, q, k, v, features)

    # The batch may reorder spans: follow its positions back to each span's own order.
    begins = [_begin(batch, span, block_size) for span in spans]
    order = sorted(range(len(spans)), key=begins.__getitem__)
    raw = [torch.cat([past[i], k[:, begins[i] : begins[i] + len(spans[i].token_ids)].transpose(0, 1)]) for i in order]
    everywhere = torch.arange(blocks)
    expected = paged_attention(
        q.transpose(0, 1),
        [spans[i] for i in order],
        layer.codec.read_keys(layer.views, everywhere, shape, torch.float32),
        layer.codec.read_values(layer.views, everywhere, shape, torch.float32),
        features,
        raw if tails.ring else None,
    )
    assert got.shape == (tokens, heads, shape.v_dim)
    return float((got.double() - expected).abs().max())


def _past(pool: KVPool, span: Span) -> Tensor:
    """Writes what the pool holds before the span, and returns its keys [start, kv_heads, k_dim]."""
    size, layer = pool.block_size, pool.layers[0]
    end = span.start + len(span.token_ids)
    for at, block in enumerate(span.table):
        if at * size < span.start or (end < (at + 1) * size and at * size < end):  # begun before, or not filled now
            pool.clear(block)
    keys = torch.randn(span.start, layer.shape.kv_heads, layer.shape.k_dim)
    values = torch.randn(span.start, layer.shape.kv_heads, layer.shape.v_dim)
    if span.start:
        positions = torch.arange(span.start)
        blocks, offsets = torch.tensor(span.table)[positions // size], positions % size
        layer.codec.write_values(layer.views, blocks, offsets, values)
        if isinstance(layer.codec, PerToken):
            layer.codec.write_keys(layer.views, blocks, offsets, keys)
    if isinstance(layer.codec, PerBlock):
        full = span.start // size
        if full:
            whole = keys[: full * size].view(full, size, *keys.shape[1:])
            layer.codec.seal_keys(layer.views, torch.tensor(span.table[:full]), whole)
        rows = span.slot * pool.tails.ring + torch.arange(full * size, span.start) % pool.tails.ring
        layer.tail[rows] = keys[full * size :]
    return keys


def _begin(batch: Batch, span: Span, block_size: int = B) -> int:
    where = (batch.blocks == span.table[span.start // block_size]) & (batch.positions == span.start)
    return int(where.nonzero()[0])


GQA = LayerShape(3, 64, 64)
LENGTHS = [1, B - 1, B, B + 1, 2 * B, 3 * B + 5]


@pytest.mark.parametrize("codec", ["none", "int4"])
@pytest.mark.parametrize("length", [*LENGTHS, TILE, TILE + 1, 2 * TILE + 7])
def test_a_whole_prompt(length: int, codec: str) -> None:
    assert difference(spans_over([(0, length)], 40), GQA, 9, Features(0.125), codec=codec) < 1e-5


@pytest.mark.parametrize("codec", ["none", "int4"])
@pytest.mark.parametrize("start", LENGTHS)
@pytest.mark.parametrize("length", [1, 2, 5, 17])
def test_a_few_tokens_after_a_prefix(start: int, length: int, codec: str) -> None:
    assert difference(spans_over([(start, length)], 40), GQA, 9, Features(0.125), codec=codec) < 1e-5


MIXED = [(0, 40), (3, 1), (100, 1), (15, 5), (16, 2), (600, 1), (31, 150), (0, 1), (330, 9), (200, 1)]


@pytest.mark.parametrize(
    ("shape", "heads"),
    [
        (GQA, 9),
        (LayerShape(8, 16, 16), 8),
        (LayerShape(1, 80, 80), 8),
        (LayerShape(2, 96, 96), 8),
        (LayerShape(2, 128, 128), 4),
        (LayerShape(4, 24, 16), 4),  # keys wider than values, as in multi-head latent attention
    ],
)
@pytest.mark.parametrize(
    "features",
    [
        Features(0.125),
        Features(0.3, window=1),
        Features(0.125, window=20),
        Features(0.125, window=B),
        Features(0.125, softcap=1.0),
        Features(0.125, window=50, softcap=30.0),
    ],
    ids=str,
)
def test_a_mixed_ragged_batch(shape: LayerShape, heads: int, features: Features) -> None:
    assert difference(spans_over(MIXED, 130), shape, heads, features) < 2e-5


@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("shape", [GQA, LayerShape(4, 25, 17)], ids=str)
@pytest.mark.parametrize(
    "features", [Features(0.125), Features(0.3, window=5), Features(0.125, window=50, softcap=30.0)], ids=str
)
def test_a_mixed_ragged_batch_of_quantised_kv(codec: str, shape: LayerShape, features: Features) -> None:
    assert difference(spans_over(MIXED, 130), shape, 3 * shape.kv_heads, features, codec=codec) < 2e-5


@pytest.mark.parametrize("codec", ["none", "int4"])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_take_weight_and_have_no_value(window: int | None, codec: str) -> None:
    sinks = torch.linspace(-2, 4, 9)
    assert difference(spans_over(MIXED, 130), GQA, 9, Features(0.125, window, None, sinks), codec=codec) < 2e-5


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 64),
    codec=st.sampled_from(["none", "int4"]),
    block_size=st.sampled_from([4, B, 24]),
    seed=st.integers(0, 2**16),
)
def test_any_ragged_batch(
    shapes: list[tuple[int, int]], window: int | None, codec: str, block_size: int, seed: int
) -> None:
    spans = spans_over(shapes, 540, seed, block_size)
    features = Features(0.25, window)
    shape = LayerShape(2, 16, 16)
    assert difference(spans, shape, 4, features, codec=codec, block_size=block_size, seed=seed) < 2e-5


def test_reserved_blocks_beyond_the_end_are_not_read() -> None:
    """A longer neighbour pads this span's table; the blocks it has in reserve may hold anything."""
    torch.manual_seed(0)
    pool = KVPool([GQA], 40, B, torch.float32, CPU, Raw())
    for block in range(20, 40):
        pool.layers[0].views["keys"][block] = torch.nan
        pool.layers[0].views["values"][block] = torch.nan
    spans = [Span((1,), 20, (0, 1, 20, 21, 22)), Span((1,), 60, (2, 3, 4, 5))]
    q, k, v = torch.randn(9, 2, 64), torch.randn(3, 2, 64), torch.randn(3, 2, 64)
    out = Paged(pool, build(spans, B, CPU)).attend(0, q, k, v, Features(0.125))
    assert out.isfinite().all()


def test_batches_of_similar_length_are_attended_together_and_others_apart() -> None:
    """Padding must stay bounded: one long neighbour may not make every short sequence as expensive."""
    batch = build(spans_over([(40, 1), (60, 1), (2000, 1), (50, 3), (1900, 1), (0, 64)], 400), B, CPU)
    assert sorted(g.sequences for g in batch.groups) == [1, 2, 3]
