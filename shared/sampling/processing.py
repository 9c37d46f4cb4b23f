"""Bias and penalties on logits, wherever these are. See `shared.sampling.adjustments` for the rules.

Values are computed in float64 and rounded once, by the same operations on every device, so that all come to the same
logits. Which of them change is known from the requests: nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.sampling.adjustments import Adjustments, Integers
from shared.sampling.device import moved
from shared.sampling.params import Row


def adjusted(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """`logits` [len(rows), vocab] (float32) with the rows' adjustments: a copy, or itself if there are none."""
    wanted = [(i, row, row.adjustments) for i, row in enumerate(rows) if row.adjustments is not None]
    if not wanted:
        return logits
    logits = logits.clone()
    biased = [(i, a) for i, _, a in wanted if a.bias_ids]
    if biased:
        _bias(logits, biased)
    penalised = [(i, row, a) for i, row, a in wanted if a.penalises]
    if penalised:
        _penalise(logits, penalised)
    held_off = [(i, a.held_off(row.position)) for i, row, a in wanted]
    if any(ids for _, ids in held_off):
        at, ids = moved(torch.from_numpy(_places(held_off)), logits.device)
        held = logits[at, ids]
        logits[at, ids] = held.masked_fill(held < math.inf, -math.inf)  # an output that was unusable must stay so
    return logits


def _places(chosen: Sequence[tuple[int, Integers]]) -> np.ndarray:
    """Row and token of each of these logits, int64 [2, logits]. Never one twice."""
    rows = np.repeat([i for i, _ in chosen], [len(ids) for _, ids in chosen])
    return np.stack([rows, np.concatenate([np.array(ids, dtype=np.int64) for _, ids in chosen])])


def _bias(logits: Tensor, biased: Sequence[tuple[int, Adjustments]]) -> None:
    at, ids = moved(torch.from_numpy(_places([(i, a.bias_ids) for i, a in biased])), logits.device)
    bias = moved(torch.from_numpy(np.concatenate([np.array(a.bias) for _, a in biased])), logits.device)
    logits[at, ids] = (logits[at, ids].double() + bias).to(logits.dtype)


def _penalise(logits: Tensor, penalised: Sequence[tuple[int, Row, Adjustments]]) -> None:
    counted = [a.counts(row.guessed) for _, row, a in penalised]
    places = _places([(n, ids) for n, (ids, _) in enumerate(counted)])
    if not places.size:
        return
    counts = np.concatenate([np.array(counts, dtype=np.int64) for _, counts in counted])
    nth, ids, times = moved(torch.from_numpy(np.vstack([places, counts])), logits.device)
    numbers = [
        (a.sampling.repetition_penalty, a.sampling.frequency_penalty, a.sampling.presence_penalty)
        for _, _, a in penalised
    ]
    repetition, frequency, presence = moved(torch.tensor(numbers, dtype=torch.float64), logits.device)[nth].T
    at = moved(torch.tensor([i for i, _, _ in penalised]), logits.device)[nth]
    before = logits[at, ids].double()
    after = torch.where(before > 0, before / repetition, before * repetition)
    after -= frequency * times
    after -= presence * (times > 0)
    # A penalty near 0 makes logits huge, but an output that was unusable must stay so.
    after = torch.where(before.isinf(), before, after.clamp(max=torch.finfo(logits.dtype).max))
    logits[at, ids] = after.to(logits.dtype)
