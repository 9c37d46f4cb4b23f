"""How many drafts would be accepted. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

DEPTHS = range(1, 9)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of greedy answers: at depth k, each step of the target verifies k drafts and gives one token more than it
    accepts."""

    positions: int
    agreement: float
    """Share of positions at which the drafter's most likely token is the target's."""
    accepted: dict[int, float]
    """By depth: mean number of drafts accepted in a step."""
    tokens_per_step: dict[int, float]
    """By depth."""

    @classmethod
    def of(cls, answers: Sequence[np.ndarray]) -> Acceptance:
        """Of answers (bool [n], see `runs`), not all of them empty."""
        positions = sum(map(len, answers))
        accepted, per_step = {}, {}
        for depth in DEPTHS:
            taken = [run for answer in answers for run in runs(answer, depth)]
            accepted[depth] = sum(taken) / len(taken)
            per_step[depth] = positions / len(taken)
        return cls(positions, float(np.concatenate(list(answers)).mean()), accepted, per_step)


def runs(agreed: np.ndarray, depth: int) -> list[int]:
    """Drafts accepted in each step of an answer of n tokens, where `agreed` [n] says at which of them the drafter,
    given what stands before, proposes what the target takes.

    Drafts come `depth` at a time and are accepted up to the first that differs; the target itself gives the next one.
    A drafter that is right so far reads what the target wrote, so agreement on the target's text is all that counts.
    """
    at, taken = 0, []
    while at < len(agreed):
        window = agreed[at : at + depth]
        wrong = np.flatnonzero(~window)
        taken.append(int(wrong[0]) if len(wrong) else len(window))
        at += taken[-1] + 1
    return taken


def turns(scored: np.ndarray, agreed: np.ndarray) -> Iterable[np.ndarray]:
    """`agreed` [r], cut where the positions `scored` [r] leave out some: into the answers of a conversation."""
    return np.split(agreed, np.flatnonzero(np.diff(scored) != 1) + 1)
