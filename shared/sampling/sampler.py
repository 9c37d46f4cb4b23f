"""Logits to tokens: the argmax of adjusted, scaled, filtered logits plus Gumbel noise keyed by seed and position.

The same rule serves first tokens, decode steps, verification of drafts and the drafter itself; that is what makes
the text independent of drafts, of batching and of restarts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.errors import TrineError
from shared.sampling.device import choose
from shared.sampling.filters import candidates
from shared.sampling.noise import MAX_GUMBEL, gumbel, gumbel_of
from shared.sampling.params import Row, is_greedy
from shared.sampling.processing import adjusted

__all__ = ["BadLogits", "Row", "sample"]


class BadLogits(TrineError):
    """Rows whose largest logit, after bias and penalties, is NaN or infinite.

    `rows` are their indices; the other rows can be sampled again.
    """

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__(f"logits without a finite maximum in rows {list(rows)[:8]}: the model's output is unusable")
        self.rows = rows


def sample(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """The token of each row of `logits` [len(rows), vocab] (float32, any device).

    A row's token depends on that row alone. Greedy rows take the largest logit, equal ones the lowest id. `logits` are
    not changed.
    Raises BadLogits when a row holds NaN or +inf, or nothing but -inf; -inf masks single tokens.
    """
    if logits.ndim != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(rows)} rows")
    if not rows:
        return []
    logits = adjusted(logits, rows)
    return _on_device(logits, rows) if logits.is_cuda else _on_host(logits, rows)


def _on_device(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    tokens: list[int] = choose(logits, rows).tolist()  # the step's only wait for the device
    bad = tuple(i for i, token in enumerate(tokens) if token < 0)
    if bad:
        raise BadLogits(bad)
    return tokens


def _on_host(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    largest, best = logits.max(dim=-1)
    usable = largest.isfinite()  # NaN counts as the largest
    if not usable.all():
        raise BadLogits(tuple(torch.nonzero(~usable).flatten().tolist()))
    tokens: list[int] = best.tolist()
    for index, row in enumerate(rows):
        if not is_greedy(row.sampling):
            tokens[index] = _draw(logits[index], row)
    return tokens


def _draw(logits: Tensor, row: Row) -> int:
    ids, scaled = candidates(logits, row.sampling)
    if ids.numel() > 1:
        ids, scaled = _contenders(ids, scaled, row)
    noisy = scaled + gumbel(row.seed, row.position, ids)
    return int(ids[noisy.argmax()])


def _contenders(ids: Tensor, scaled: Tensor, row: Row) -> tuple[Tensor, Tensor]:
    """Only those that can still win: no noise lifts the others above the most likely token with its own noise."""
    floor = gumbel_of(row.seed, row.position, int(ids[scaled.argmax()])) - MAX_GUMBEL
    kept = torch.nonzero(scaled >= floor).flatten()
    return ids[kept], scaled[kept]
