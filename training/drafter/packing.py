"""Sequences of different lengths as one row of tokens, without padding.

Everything but attention works on the row. Attention works on a rectangle, one sequence a line, that is gathered from
the row and scattered back: causal attention never looks at what stands to the right, so the padding at the end of a
line needs no mask, and sequences cannot see each other. `plan` puts sequences of similar length together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

_SORTED = 16
"""So many batches' worth of sequences are sorted by length, and cut into batches."""


@dataclass(frozen=True, slots=True)
class Packed:
    tokens: Tensor
    """int64 [n]"""
    positions: Tensor
    """int64 [n], each sequence's from 0"""
    cells: Tensor
    """int64 [sequences * longest]: which token stands there; padding repeats the sequence's last."""
    places: Tensor
    """int64 [n]: where a token stands among the cells."""
    sequences: int

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], device: torch.device) -> Packed:
        """Of at least one sequence, none of them empty."""
        lengths = np.array([len(s) for s in sequences])
        begins = np.cumsum(lengths) - lengths
        column = np.arange(int(lengths.max()))
        cells = begins[:, None] + np.minimum(column, lengths[:, None] - 1)
        places = np.flatnonzero(column < lengths[:, None])
        positions = np.arange(int(lengths.sum())) - np.repeat(begins, lengths)

        def moved(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(device)

        return cls(
            moved(np.concatenate(sequences)), moved(positions), moved(cells.ravel()), moved(places), len(lengths)
        )


def plan(lengths: Sequence[int], batch_tokens: int, epochs: int, seed: int) -> list[list[int]]:
    """Which sequences (indices) make which batch, over all epochs: each once an epoch.

    A batch has at most `batch_tokens` tokens, or one sequence. A function of its arguments alone.
    """
    batches = []
    for epoch in range(epochs):
        rng = Random(f"{seed} {epoch}")
        order = list(range(len(lengths)))
        rng.shuffle(order)
        mean = max(1, sum(lengths) // max(1, len(lengths)))
        window = max(1, _SORTED * batch_tokens // mean)
        cut = [_cut(order[i : i + window], lengths, batch_tokens) for i in range(0, len(order), window)]
        mixed = [batch for group in cut for batch in group]
        rng.shuffle(mixed)
        batches += mixed
    return batches


def _cut(members: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    held = 0
    for i in sorted(members, key=lambda i: (lengths[i], i)):
        if batches[-1] and held + lengths[i] > batch_tokens:
            batches.append([])
            held = 0
        batches[-1].append(i)
        held += lengths[i]
    return batches
