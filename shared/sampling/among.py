"""Tokens chosen among a part of the vocabulary, as a draft head knows one, by the rules and the noise of `sampler`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.sampling.device import drawable, moved
from shared.sampling.noise import gumbel_each
from shared.sampling.params import Row, is_greedy
from shared.sampling.processing import adjusted
from shared.sampling.sampler import BadLogits

CONTENDERS = 256
"""Of a sampled row only so many of the likeliest tokens get noise, which costs more than the head itself otherwise. All
others together are drawn seldom, and then are hardly ever what the target draws."""


def sample_among(logits: Tensor, rows: Sequence[Row], ids: Tensor) -> tuple[list[int], list[float]]:
    """As `sample`, where `logits` [len(rows), len(ids)] (float32) are those of the tokens `ids` (int64, ascending) and
    all others of the vocabulary are masked; but see `CONTENDERS`.

    With each token comes its probability among `ids` after adjustments and temperature (1 for greedy rows), before
    filters. Raises BadLogits.
    """
    if not rows:
        return [], []
    if any(row.adjustments is not None for row in rows):
        logits = adjusted(logits, rows, ids.cpu().numpy())
    largest, best = logits.max(dim=-1)
    usable = largest.isfinite()  # NaN counts as the largest
    if not usable.all():
        raise BadLogits(tuple(torch.nonzero(~usable).flatten().tolist()))
    sampled = [i for i, row in enumerate(rows) if not is_greedy(row.sampling)]
    if not sampled:
        return ids[best].tolist(), (largest - logits.logsumexp(-1)).exp_().tolist()
    at = moved(torch.tensor(sampled), logits.device)
    best[at] = _drawn(logits[at], [rows[i] for i in sampled], ids)
    scaled = logits / _temperatures(rows, logits).float()[:, None]
    chosen = scaled.gather(1, best[:, None])[:, 0]
    return ids[best].tolist(), (chosen - scaled.logsumexp(-1)).exp_().tolist()


def _drawn(logits: Tensor, rows: Sequence[Row], ids: Tensor) -> Tensor:
    """Which of the `ids` each row takes, int64 [len(rows)]."""
    values, places = logits.topk(min(CONTENDERS, logits.shape[1]), dim=-1)
    scaled = (values.double() - values[:, :1].double()) / _temperatures(rows, logits)[:, None]
    kept = drawable(values, rows)
    noise = gumbel_each([row.seed for row in rows], [row.position for row in rows], ids[places].cpu())
    noisy = scaled.masked_fill(kept == -math.inf, -math.inf) + noise.to(logits.device)
    return places.gather(1, noisy.argmax(dim=-1, keepdim=True))[:, 0]


def _temperatures(rows: Sequence[Row], logits: Tensor) -> Tensor:
    temperatures = [1.0 if is_greedy(row.sampling) else row.sampling.temperature for row in rows]
    return moved(torch.tensor(temperatures, dtype=torch.float64), logits.device)
