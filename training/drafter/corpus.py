"""Answers as rows: at each of their positions what a head reads there, what the target thought, what it wrote.

A row is a position of an answer. A chain of drafts begins at a row and goes on to the next ones, as long as they
are of the same answer. It begins with the hidden state of the row before, so none begins at an answer's first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.drafter.loss import Thoughts
from training.drafter.shards import Conversation
from training.drafter.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Corpus:
    """Of r rows. All tensors that it gives are on `device`."""

    windows: np.ndarray
    """int32 [r, window]: the tokens up to and at the position, newest first; the target's vocabulary size where the
    conversation has none."""
    ids: np.ndarray
    """int32 [r, k]: the most likely tokens after it, in the head's vocabulary; -1 outside of it."""
    logp: np.ndarray
    """float16 [r, k]"""
    written: np.ndarray
    """int32 [r]: the token after it, in the head's vocabulary; -1 outside of it."""
    left: np.ndarray
    """int32 [r]: rows of the same answer after it."""
    starts: np.ndarray
    """int64, ascending: rows that a chain can begin at."""
    hidden: Sequence[np.ndarray]
    """float16 [., hidden_size] each; all together one for each row. They may be files."""
    device: torch.device

    @classmethod
    def of(
        cls,
        talks: Sequence[Conversation],
        hidden: Sequence[np.ndarray],
        vocabulary: Vocabulary,
        window: int,
        device: torch.device,
    ) -> Corpus:
        """Of at least one conversation. The rows of `talks`, one after the other, are those of `hidden`."""
        runs = [talk.scored[1:] == talk.scored[:-1] + 1 for talk in talks]
        goes_on = np.concatenate(
            [np.append(run, False)[: len(talk.scored)] for run, talk in zip(runs, talks, strict=True)]
        )
        ends = np.flatnonzero(~goes_on)
        rows = np.arange(len(goes_on))
        left = ends[np.searchsorted(ends, rows)] - rows if len(rows) else rows
        return cls(
            windows=np.concatenate([_windows(talk, window, vocabulary.target_size) for talk in talks]),
            ids=vocabulary.own(np.concatenate([talk.top_ids for talk in talks])),
            logp=np.concatenate([talk.top_logp for talk in talks]),
            written=vocabulary.own(np.concatenate([talk.tokens[talk.scored + 1] for talk in talks])),
            left=left.astype(np.int32),
            starts=np.flatnonzero(goes_on) + 1,
            hidden=hidden,
            device=device,
        )

    def states(self, rows: np.ndarray) -> Tensor:
        """The target's hidden states, float32 [n, hidden_size]."""
        cuts = np.cumsum([len(part) for part in self.hidden])
        which = np.searchsorted(cuts, rows, side="right")
        result = np.empty((len(rows), self.hidden[0].shape[1]), np.float16)
        for i in np.unique(which):
            chosen = which == i
            result[chosen] = self.hidden[i][rows[chosen] - (cuts[i] - len(self.hidden[i]))]
        return torch.from_numpy(result).to(self.device).float()

    def read(self, rows: np.ndarray) -> Tensor:
        """Windows, int64 [n, window]."""
        return torch.from_numpy(self.windows[rows]).to(self.device).long()

    def own(self, rows: np.ndarray) -> Tensor:
        """`written`, int64 [n]."""
        return torch.from_numpy(self.written[rows]).to(self.device).long()

    def goes_on(self, rows: np.ndarray) -> Tensor:
        """Whether the next row is of the same answer, bool [n]."""
        return torch.from_numpy(self.left[rows] > 0).to(self.device)

    def thoughts(self, rows: np.ndarray) -> Thoughts:
        ids, logp = torch.from_numpy(self.ids[rows]), torch.from_numpy(self.logp[rows])
        return Thoughts(ids.to(self.device).long(), logp.to(self.device).float())


def scale(hidden: np.ndarray) -> np.ndarray:
    """Root mean square of each element: float32 [hidden_size], of states [r, hidden_size], none of them 0."""
    mean = np.mean(np.square(hidden, dtype=np.float32), 0, dtype=np.float64)
    result: np.ndarray = np.sqrt(mean).astype(np.float32)
    return result


def _windows(talk: Conversation, window: int, missing: int) -> np.ndarray:
    padded = np.concatenate([np.full(window - 1, missing, np.int32), talk.tokens])
    newest_first: np.ndarray = padded[(talk.scored + (window - 1))[:, None] - np.arange(window)]
    return newest_first
