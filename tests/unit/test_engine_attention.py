"""Paged attention against the float64 reference, on ragged batches over scattered blocks."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.attention import Features, Paged
from shared.engine.batch import TILE, build
from shared.engine.codecs.base import LayerShape
from shared.engine.codecs.none import Raw
from shared.engine.pool import KVPool
from shared.engine.reference import paged_attention
from shared.engine.span import Span

CPU = torch.device("cpu")
B = 16


def spans_over(shapes: list[tuple[int, int]], blocks: int, seed: int = 0) -> list[Span]:
    """Spans of (start, length) whose tables are disjoint and scattered over the pool."""
    free = list(range(blocks))
    random.Random(seed).shuffle(free)
    spans = []
    for start, length in shapes:
        table = tuple(free.pop() for _ in range(-(-(start + length) // B)))
        spans.append(Span((1,) * length, start, table))
    return spans


def difference(
    spans: list[Span], shape: LayerShape, heads: int, features: Features, *, poison: bool = True, seed: int = 0
) -> float:
    """Largest difference from the reference. What no span may read is NaN when `poison` is set."""
    torch.manual_seed(seed)
    blocks = 1 + max(b for s in spans for b in s.table)
    pool = KVPool([shape], blocks, B, torch.float32, CPU, Raw())
    used = {b for s in spans for b in s.table}
    for block in range(blocks):
        keep = block in used or not poison
        pool.layers[0].views["keys"][block] = (
            torch.randn(pool.layers[0].views["keys"][block].shape) if keep else torch.nan
        )
        pool.layers[0].views["values"][block] = (
            torch.randn(pool.layers[0].views["values"][block].shape) if keep else torch.nan
        )
    batch = build(spans, B, CPU)
    tokens = len(batch.token_ids)
    q = torch.randn(heads, tokens, shape.k_dim)
    k = torch.randn(shape.kv_heads, tokens, shape.k_dim)
    v = torch.randn(shape.kv_heads, tokens, shape.v_dim)
    got = Paged(pool, batch).attend(0, q, k, v, features)

    # The batch may reorder spans: follow its positions back to each span's own order.
    order = sorted(range(len(spans)), key=lambda i: _begin(batch, spans[i]))
    expected = paged_attention(
        q.transpose(0, 1),
        [spans[i] for i in order],
        pool.layers[0].views["keys"],
        pool.layers[0].views["values"],
        features,
    )
    assert got.shape == (tokens, heads, shape.v_dim)
    return float((got.double() - expected).abs().max())


def _begin(batch: object, span: Span) -> int:
    where = (batch.blocks == span.table[span.start // B]) & (batch.positions == span.start)  # type: ignore[attr-defined]
    return int(where.nonzero()[0])


GQA = LayerShape(3, 64, 64)
LENGTHS = [1, B - 1, B, B + 1, 2 * B, 3 * B + 5]


@pytest.mark.parametrize("length", [*LENGTHS, TILE, TILE + 1, 2 * TILE + 7])
def test_a_whole_prompt(length: int) -> None:
    assert difference(spans_over([(0, length)], 40), GQA, 9, Features(0.125)) < 1e-5


@pytest.mark.parametrize("start", LENGTHS)
@pytest.mark.parametrize("length", [1, 2, 5, 17])
def test_a_few_tokens_after_a_prefix(start: int, length: int) -> None:
    assert difference(spans_over([(start, length)], 40), GQA, 9, Features(0.125)) < 1e-5


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


@pytest.mark.parametrize("window", [None, 20])
def test_sinks_take_weight_and_have_no_value(window: int | None) -> None:
    sinks = torch.linspace(-2, 4, 9)
    assert difference(spans_over(MIXED, 130), GQA, 9, Features(0.125, window, None, sinks)) < 2e-5


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 64),
    seed=st.integers(0, 2**16),
)
def test_any_ragged_batch(shapes: list[tuple[int, int]], window: int | None, seed: int) -> None:
    spans = spans_over(shapes, 140, seed)
    assert difference(spans, LayerShape(2, 16, 16), 4, Features(0.25, window), seed=seed) < 2e-5


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
