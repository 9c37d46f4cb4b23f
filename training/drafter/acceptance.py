"""How many tokens a step of the target gives. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DEPTHS = range(1, 9)


def tokens_per_step(answers: Sequence[np.ndarray]) -> dict[int, float]:
    """By depth, for greedy answers: for each how many drafts (int [n]) would come true at each position. Not all of
    them are empty.

    At depth k, each step verifies k drafts, and gives one token more than it accepts.
    """
    positions = sum(map(len, answers))
    return {depth: positions / sum(steps(answer, depth) for answer in answers) for depth in DEPTHS}


def steps(true: np.ndarray, depth: int) -> int:
    """Steps of the target for an answer of n tokens, where from position i on `true[i]` drafts in a row come true."""
    at = count = 0
    while at < len(true):
        at += min(int(true[at]), depth) + 1
        count += 1
    return count
