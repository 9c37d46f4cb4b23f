"""A draft head without a network, for `FakeEngine`: it looks back so far that it knows what comes next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.engine.base import BadSpans
from shared.sampling.params import Row
from tests.fake_engine import HIDDEN, next_token

FAR = 1 << 17


@dataclass(frozen=True, slots=True)
class Facts:
    hidden_size: int = HIDDEN
    window: int = FAR
    eos_ids: frozenset[int] = frozenset()


class FakeHead:
    """Right, but in every `wrong_every`-th place. It checks that hidden states, tokens and places belong together: a
    state that was told is that of the last token, and what a step gave is handed to the next one."""

    def __init__(self, *, wrong_every: int = 0, likely: float = 0.99, eos_ids: frozenset[int] = frozenset()) -> None:
        self.info = Facts(eos_ids=eos_ids)
        self.steps: list[int] = []
        """Sequences in each."""
        self.rows: list[Row] = []
        self.likely = likely
        self.stall_s = 0.0  # that the next step takes
        self.poison: int | None = None  # a last token that makes the step raise
        self.banned: int | None = None  # a last token after which there is nothing to choose
        self._wrong_every = wrong_every

    def start(self, hidden: Sequence[bytes]) -> list[tuple[int, int]]:
        """Place and token, as `fake_engine.hidden_state` tells them."""
        assert hidden
        known = [np.frombuffer(state, dtype="<f2").astype(int).tolist() for state in hidden]
        return [(1000 * k[0] + k[1], 1000 * k[2] + k[3]) for k in known]

    def step(
        self, features: Any, windows: Sequence[Sequence[int]], rows: Sequence[Row]
    ) -> tuple[list[int], list[float], list[tuple[int, int]]]:
        time.sleep(self.stall_s)
        self.stall_s = 0.0
        self.steps.append(len(rows))
        self.rows += rows
        assert len(features) == len(windows) == len(rows)
        for feature, window, row in zip(features, windows, rows, strict=True):
            assert len(window) == row.position, "all there is"
            assert feature in ((row.position - 1, window[0]), (0, 0))
        if any(window[0] == self.poison for window in windows):
            raise RuntimeError("poisoned")
        if bad := tuple(i for i, window in enumerate(windows) if window[0] == self.banned):
            raise BadSpans(bad)
        tokens = [self._next(window) for window in windows]
        following = [(row.position, token) for row, token in zip(rows, tokens, strict=True)]
        return tokens, [self.likely] * len(rows), following

    def _next(self, window: Sequence[int]) -> int:
        token = next_token(window[::-1])
        return (token + 1) % 1000 if self._wrong_every and len(window) % self._wrong_every == 0 else token
