"""Which of the target's tokens a draft head can propose. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shared.errors import ConfigError
from training.drafter.shards import Conversation


@dataclass(frozen=True)
class Vocabulary:
    """The head's id `i` is the target's id `target_ids[i]`; int32, ascending."""

    target_ids: np.ndarray
    target_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.ndim != 1 or not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= self.target_size:
            raise ConfigError(f"not ascending ids below {self.target_size}", field="vocabulary")

    @classmethod
    def of(cls, conversations: Iterable[Conversation], size: int, target_size: int) -> Vocabulary:
        """The `size` tokens to which the target gives most probability, all positions together.

        Where fewer were seen, the lowest ids fill up: a byte-pair vocabulary has its commonest tokens first.
        """
        mass = np.zeros(target_size)
        for talk in conversations:
            np.add.at(mass, talk.top_ids.ravel(), np.exp(talk.top_logp.astype(np.float32)).ravel())
        order = np.lexsort((np.arange(target_size), -mass))
        return cls(np.sort(order[:size]).astype(np.int32), target_size)

    def __len__(self) -> int:
        return len(self.target_ids)

    @cached_property
    def _own(self) -> np.ndarray:
        own = np.full(self.target_size, -1, np.int32)
        own[self.target_ids] = np.arange(len(self.target_ids))
        return own

    def own(self, target_ids: np.ndarray) -> np.ndarray:
        """The head's ids of these target ids, int32, the same shape; -1 for those that it cannot propose."""
        result: np.ndarray = self._own[target_ids]
        return result
