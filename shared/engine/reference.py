"""Paged attention as its definition reads, in float64, a query and a head at a time, to test the fast one against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.attention import Features
from shared.engine.span import Span


def paged_attention(query: Tensor, spans: Sequence[Span], keys: Tensor, values: Tensor, features: Features) -> Tensor:
    """query [tokens of all spans, heads, k_dim]; keys and values [blocks, block_size, kv_heads, dim], which hold the
    spans' own tokens already → [tokens, heads, v_dim] in float64."""
    rows = iter(query.double())
    outs = [
        _attend_one(next(rows), *_sequence(span, position, keys, values, features.window), features)
        for span in spans
        for position in range(span.start, span.start + len(span.token_ids))
    ]
    return torch.stack(outs)


def _sequence(span: Span, position: int, keys: Tensor, values: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Keys and values [n, kv_heads, dim] that the query at `position` sees."""
    first = max(0, position - window + 1) if window else 0
    size = keys.shape[1]
    where = [(span.table[p // size], p % size) for p in range(first, position + 1)]
    return torch.stack([keys[at] for at in where]).double(), torch.stack([values[at] for at in where]).double()


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, features: Features) -> Tensor:
    """query [heads, k_dim] → [heads, v_dim]."""
    share = query.shape[0] // keys.shape[1]
    outs = []
    for head, q in enumerate(query):
        scores = keys[:, head // share] @ q * features.scale
        if features.softcap is not None:
            scores = torch.tanh(scores / features.softcap) * features.softcap
        top = float(scores.max())
        weights = torch.exp(scores - top)
        total = weights.sum()
        if features.sinks is not None:
            total = total + math.exp(float(features.sinks[head]) - top)
        outs.append((weights / total) @ values[:, head // share])
    return torch.stack(outs)
