"""Paged attention as its definition reads, in float64, a query at a time, to test the fast one against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.attention import Features
from shared.engine.span import Span


def paged_attention(
    query: Tensor,
    spans: Sequence[Span],
    keys: Tensor,
    values: Tensor,
    features: Features,
    raw: Sequence[Tensor] | None = None,
) -> Tensor:
    """query [tokens of all spans, heads, k_dim]; keys and values [blocks, block_size, kv_heads, dim], which hold the
    spans' own tokens already → [tokens, heads, v_dim] in float64.

    Of codecs that seal, `raw` has each span's keys as they were, [positions from 0 to its end, kv_heads, k_dim]: a
    query takes those of its own block from there.
    """
    rows = iter(query.double())
    outs = []
    for i, span in enumerate(spans):
        for position in range(span.start, span.start + len(span.token_ids)):
            seen = _seen(position, features.window)
            k = _keys(span, seen, keys, None if raw is None else raw[i])
            outs.append(_attend_one(next(rows), k, _rows(span, seen, values), features))
    return torch.stack(outs)


def _seen(position: int, window: int | None) -> range:
    return range(max(0, position - window + 1) if window else 0, position + 1)


def _rows(span: Span, positions: Sequence[int], pool: Tensor) -> Tensor:
    """[positions, kv_heads, dim]"""
    size = pool.shape[1]
    return pool[[span.table[p // size] for p in positions], [p % size for p in positions]].double()


def _keys(span: Span, seen: range, keys: Tensor, raw: Tensor | None) -> Tensor:
    """The query stands at the last position seen."""
    if raw is None:
        return _rows(span, seen, keys)
    own = max(seen[-1] // keys.shape[1] * keys.shape[1], seen[0])
    fresh = raw[own : seen[-1] + 1].double()
    return torch.cat([_rows(span, range(seen[0], own), keys), fresh]) if own > seen[0] else fresh


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, features: Features) -> Tensor:
    """query [heads, k_dim] → [heads, v_dim]."""
    share = query.shape[0] // keys.shape[1]
    scores = torch.einsum("hd,nhd->hn", query, keys.repeat_interleave(share, 1)) * features.scale
    if features.softcap is not None:
        scores = torch.tanh(scores / features.softcap) * features.softcap
    if features.sinks is not None:
        scores = torch.cat([scores, features.sinks.double()[:, None]], 1)
    weights = scores.softmax(-1)[:, : len(keys)]
    return torch.einsum("hn,nhd->hd", weights, values.repeat_interleave(share, 1))
