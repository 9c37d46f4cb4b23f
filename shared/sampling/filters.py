"""Which tokens may be drawn: temperature, then top-k, top-p, min-p, in this order (that of `transformers`).

Tokens are ranked by logit, equal logits by lower id. Each filter sees what the one before it kept, renormalised:

- top-k keeps the first k of the ranking, never more (0 and anything from the vocabulary's size up keep all);
- top-p keeps the shortest head of the ranking whose probability reaches p, so always at least one token (1 keeps all);
- min-p keeps tokens at least `min_p` times as likely as the most likely one, equal ones included (0 keeps all).

Temperature comes first, so top-p and min-p see the distribution that is drawn from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.messages import Sampling

HEADS = (256, 4096)
"""Tokens to look for the nucleus among before sorting the whole vocabulary, which takes milliseconds."""


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens that may be drawn from one row of logits [vocab], and their log-weights.

    Returns (ids int64 ascending, scaled float64), both [kept]; `scaled` is (logit - max) / temperature, so the largest
    is 0. Masked tokens (-inf) are never kept. The row's maximum must be finite and the temperature above 0.
    """
    scaled = (logits.double() - logits.max().double()).div_(sampling.temperature)
    ids = torch.nonzero(scaled > -math.inf).flatten()
    values = scaled if ids.numel() == scaled.numel() else scaled[ids]
    if 0 < sampling.top_k < values.numel():
        ids, values = _take(ids, values, _head(values, sampling.top_k))
    if sampling.top_p < 1:
        ids, values = _take(ids, values, _nucleus(values, sampling.top_p))
    if sampling.min_p > 0:
        ids, values = _take(ids, values, torch.nonzero(values >= math.log(sampling.min_p)).flatten())
    return ids, values


def _take(ids: Tensor, values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    return ids[kept], values[kept]


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices, ascending, of the `count` largest and of all that equal the last of them."""
    if count >= values.numel():
        return torch.arange(values.numel(), device=values.device)
    return torch.nonzero(values >= torch.topk(values, count, sorted=False).values.min()).flatten()


def _ranked(values: Tensor, indices: Tensor) -> Tensor:
    return indices[torch.sort(values[indices], descending=True, stable=True).indices]


def _head(values: Tensor, k: int) -> Tensor:
    """Indices, ascending, of the first k of the ranking."""
    largest = _largest(values, k)
    return largest if largest.numel() == k else _ranked(values, largest)[:k].sort().values


def _nucleus(values: Tensor, p: float) -> Tensor:
    """Indices, ascending, of the shortest head of the ranking whose share of all weight reaches p."""
    needed = p * values.exp().sum()
    for count in (*HEADS, values.numel()):
        largest = _largest(values, count)
        if values[largest].exp().sum() >= needed:
            break
    ranked = _ranked(values, largest)
    length = int(torch.searchsorted(values[ranked].exp().cumsum(0), needed)) + 1
    return ranked[:length].sort().values
