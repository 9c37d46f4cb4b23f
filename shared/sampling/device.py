"""Sampling where the logits are, without waiting for the device: the rules of `filters`, for all rows at once.

Which rows need filters is known from the requests, so the host decides what to launch and never looks at a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.sampling.params import Row, is_greedy


@dataclass(frozen=True, slots=True)
class Limits:
    """Filters of several rows, each [rows] on the device of the logits. Neutral where a row has none."""

    temperature: Tensor
    """float64, above 0"""
    top_k: Tensor
    """int64; the vocabulary's size or more keeps all"""
    top_p: Tensor
    """float64; infinite keeps all"""
    min_p: Tensor
    """float64, the logarithm; -inf keeps all"""


def choose(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The token of each row of `logits` [len(rows), vocab], int64 [rows] on its device; -1 for rows that have none."""
    from shared.kernels.sampling import gumbel_argmax  # needs a GPU, or Triton's interpreter

    numbers, filtered = _packed(rows)
    table = moved(torch.from_numpy(numbers), logits.device)
    tops = logits.amax(dim=-1)  # NaN if one is NaN
    logits = _filtered(logits, rows, table, filtered)
    return gumbel_argmax(logits, tops, table.view(torch.float64)[2], table[0], table[1])


def drawable(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """`logits` [len(rows), tokens] with -inf in place of those that a row's filters leave out."""
    numbers, filtered = _packed(rows)
    return _filtered(logits, rows, moved(torch.from_numpy(numbers), logits.device), filtered)


def _filtered(logits: Tensor, rows: Sequence[Row], table: Tensor, filtered: Sequence[int]) -> Tensor:
    if not filtered:
        return logits
    floats = table.view(torch.float64)
    at = moved(torch.tensor(filtered), logits.device)
    limits = Limits(floats[2, at], table[3, at], floats[4, at], floats[5, at])
    ranks = any(rows[i].sampling.top_k or rows[i].sampling.top_p < 1 for i in filtered)
    return logits.index_copy(0, at, keep(logits[at], limits, ranks=ranks))


def keep(logits: Tensor, limits: Limits, *, ranks: bool) -> Tensor:
    """`logits` [rows, vocab] with -inf in place of the tokens that `filters.candidates` leaves out.

    `ranks=False` if no row has top-k or top-p: the vocabulary need not be sorted. Rows without a finite maximum give
    anything.
    """
    scaled = (logits.double() - logits.amax(-1, keepdim=True).double()) / limits.temperature[:, None]
    if not ranks:
        return logits.masked_fill(scaled < limits.min_p[:, None], -math.inf)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    scaled = scaled.gather(-1, order)
    head = torch.arange(logits.shape[-1], device=logits.device) < limits.top_k[:, None]
    weights = scaled.exp() * head
    needed = limits.top_p * weights.sum(-1)
    before = torch.nn.functional.pad(weights.cumsum(-1), (1, -1))  # of the tokens ranked higher
    kept = head & (before < needed[:, None]) & (scaled >= limits.min_p[:, None])
    return logits.masked_fill(~torch.empty_like(kept).scatter_(-1, order, kept), -math.inf)


def _packed(rows: Sequence[Row]) -> tuple[np.ndarray, list[int]]:
    """All that the device needs to know, [6, rows] int64 (one transfer), and which rows have filters."""
    numbers = np.empty((6, len(rows)), dtype=np.int64)
    floats = numbers.view(np.float64)
    filtered = []
    for i, row in enumerate(rows):
        s = row.sampling
        numbers[0, i], numbers[1, i] = _signed(row.seed), _signed(row.position)
        floats[2, i] = 0.0 if is_greedy(s) else s.temperature
        numbers[3, i] = s.top_k or np.iinfo(np.int64).max
        floats[4, i] = s.top_p if s.top_p < 1 else math.inf
        floats[5, i] = math.log(s.min_p) if s.min_p > 0 else -math.inf
        if not is_greedy(s) and (s.top_k or s.top_p < 1 or s.min_p > 0):
            filtered.append(i)
    return numbers, filtered


def _signed(number: int) -> int:
    """The same 64 bits as a signed number."""
    return (number + 2**63) % 2**64 - 2**63


def moved(host: Tensor, device: torch.device) -> Tensor:
    """On `device`, without waiting. Pinned memory is not used again before the copy has been made: torch sees to it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
