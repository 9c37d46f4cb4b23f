"""Bias, penalties and masks on logits, wherever these are. See `shared.sampling.adjustments` and `guide` for the rules.

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
from shared.sampling.guide import Masks
from shared.sampling.params import Row


def adjusted(logits: Tensor, rows: Sequence[Row], ids: np.ndarray | None = None) -> Tensor:
    """`logits` [len(rows), vocab] (float32) with the rows' adjustments and masks: a copy, or itself if there are none.

    With `ids` (int64, ascending, at least one), they are [len(rows), len(ids)], of these tokens alone, and the rows
    have no masks.
    """
    wanted = [(i, row, row.adjustments) for i, row in enumerate(rows) if row.adjustments is not None]
    masked = [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None]
    if not wanted and not masked:
        return logits
    logits = logits.clone()
    if masked:
        _mask(logits, masked)
    biased = [(i, a) for i, _, a in wanted if a.bias_ids]
    if biased:
        _bias(logits, biased, ids)
    penalised = [(i, row, a) for i, row, a in wanted if a.penalises]
    if penalised:
        _penalise(logits, penalised, ids)
    held_off = [(i, a.held_off(row.position)) for i, row, a in wanted]
    if any(eos for _, eos in held_off):
        at, columns = moved(torch.from_numpy(_places(held_off, ids)[0]), logits.device)
        held = logits[at, columns]
        logits[at, columns] = held.masked_fill(held < math.inf, -math.inf)  # an output that was unusable must stay so
    return logits


def _mask(logits: Tensor, masked: Sequence[tuple[int, Masks]]) -> None:
    words = moved(torch.from_numpy(np.stack([mask for _, mask in masked])), logits.device)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words[:, :, None] >> places & 1).bool().flatten(1)[:, : logits.shape[1]]
    at = moved(torch.tensor([i for i, _ in masked]), logits.device)
    kept = logits[at]
    logits[at] = kept.masked_fill(~allowed & (kept < math.inf), -math.inf)  # an output that was unusable must stay so


def _places(chosen: Sequence[tuple[int, Integers]], ids: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each of these tokens' logits, int64 [2, logits], and which of the tokens have one, bool
    [tokens]. Never one twice."""
    rows = np.repeat([i for i, _ in chosen], [len(tokens) for _, tokens in chosen])
    tokens = np.concatenate([np.array(tokens, dtype=np.int64) for _, tokens in chosen])
    if ids is None:
        return np.stack([rows, tokens]), np.ones(len(tokens), dtype=bool)
    columns = np.searchsorted(ids, tokens).clip(max=len(ids) - 1)
    there: np.ndarray = ids[columns] == tokens
    return np.stack([rows, columns])[:, there], there


def _bias(logits: Tensor, biased: Sequence[tuple[int, Adjustments]], ids: np.ndarray | None) -> None:
    places, there = _places([(i, a.bias_ids) for i, a in biased], ids)
    at, columns = moved(torch.from_numpy(places), logits.device)
    bias = moved(torch.from_numpy(np.concatenate([np.array(a.bias) for _, a in biased])[there]), logits.device)
    logits[at, columns] = (logits[at, columns].double() + bias).to(logits.dtype)


def _penalise(logits: Tensor, penalised: Sequence[tuple[int, Row, Adjustments]], ids: np.ndarray | None) -> None:
    counted = [a.counts(row.guessed) for _, row, a in penalised]
    places, there = _places([(n, tokens) for n, (tokens, _) in enumerate(counted)], ids)
    if not places.size:
        return
    counts = np.concatenate([np.array(counts, dtype=np.int64) for _, counts in counted])[there]
    nth, columns, times = moved(torch.from_numpy(np.vstack([places, counts])), logits.device)
    numbers = [
        (a.sampling.repetition_penalty, a.sampling.frequency_penalty, a.sampling.presence_penalty)
        for _, _, a in penalised
    ]
    repetition, frequency, presence = moved(torch.tensor(numbers, dtype=torch.float64), logits.device)[nth].T
    at = moved(torch.tensor([i for i, _, _ in penalised]), logits.device)[nth]
    before = logits[at, columns].double()
    after = torch.where(before > 0, before / repetition, before * repetition)
    after -= frequency * times
    after -= presence * (times > 0)
    # A penalty near 0 makes logits huge, but an output that was unusable must stay so.
    after = torch.where(before.isinf(), before, after.clamp(max=torch.finfo(logits.dtype).max))
    logits[at, columns] = after.to(logits.dtype)
