"""What drafts are worth: from which of them are right and what steps cost to how much faster an answer is. Pure.

A step of the target that verifies k drafts takes those up to the first that is wrong, and gives one token more
(Leviathan et al. 2023, "Fast inference from transformers via speculative decoding"). Costs are in steps without drafts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

DEPTHS = (1, 2, 4, 8)
WORTH = 1.05
"""A speed-up below this is not told from none: measured costs are off by as much."""

Propose = Callable[[int, int], Sequence[int]]
"""Of a place in an answer and a depth: up to so many guesses of what comes there, given all that stands before."""


@dataclass(frozen=True, slots=True)
class Costs:
    """In steps of the target for one token."""

    draft: float
    """Of one step of the drafter."""
    verify: Mapping[int, float]
    """Of a step of the target, by how many positions it computes: 1.0 for one. Others lie on straight lines between."""

    def step(self, drafts: int) -> float:
        """Of verifying so many drafts. Beyond what was measured the last line goes on."""
        positions = drafts + 1
        if positions in self.verify:
            return self.verify[positions]
        known = sorted(self.verify)
        right = min(max(bisect_left(known, positions), 1), len(known) - 1)
        low, high = known[right - 1], known[right]
        slope = (self.verify[high] - self.verify[low]) / (high - low)
        return self.verify[low] + slope * (positions - low)


@dataclass(frozen=True, slots=True)
class Walk:
    """An answer as drafts would have given it, step by step: (drafts verified, of these accepted)."""

    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, answer: Sequence[int], propose: Propose, depth: int) -> Walk:
        """Its first token is there already: reading the prompt gives it. As a worker does, never draft past the end."""
        steps, at = [], 1
        while at < len(answer):
            drafts = propose(at, min(depth, len(answer) - at - 1))
            accepted = agreeing(drafts, answer[at:])
            steps.append((len(drafts), accepted))
            at += accepted + 1
        return cls(tuple(steps))


def agreeing(drafts: Sequence[int], answer: Sequence[int]) -> int:
    """How many drafts are right before the first that is wrong."""
    for count, (draft, token) in enumerate(zip(drafts, answer, strict=False)):
        if draft != token:
            return count
    return min(len(drafts), len(answer))


@dataclass(frozen=True, slots=True)
class AtDepth:
    """With up to `k` drafts in each step."""

    k: int
    accepted: float
    """Mean per step."""
    speedup: float
    """Tokens per second over those without drafts."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one source of drafts is worth on answers of one kind."""

    by_place: tuple[float, ...]
    """Share of the first, second, ... drafts of a step that are right, of those that all before them were right."""
    depths: tuple[AtDepth, ...]

    @classmethod
    def of(cls, walks: Mapping[int, Sequence[Walk]], costs: Costs) -> Forecast:
        """`walks`: over the same answers, by depth."""
        return cls(_by_place(walks[max(walks)]), tuple(_at_depth(k, walks[k], costs) for k in sorted(walks)))

    @property
    def best(self) -> AtDepth:
        return max(self.depths, key=lambda at: at.speedup)

    @property
    def pays(self) -> bool:
        return self.best.speedup >= WORTH


def _at_depth(k: int, walks: Iterable[Walk], costs: Costs) -> AtDepth:
    steps = [step for walk in walks for step in walk.steps]
    if not steps:
        return AtDepth(k, 0.0, 1.0)
    accepted = sum(right for _, right in steps)
    cost = sum(costs.step(drafts) + drafts * costs.draft for drafts, _ in steps)
    return AtDepth(k, accepted / len(steps), (accepted + len(steps)) / cost)


def _by_place(walks: Iterable[Walk]) -> tuple[float, ...]:
    steps = [step for walk in walks for step in walk.steps]
    shares = []
    for place in range(max((drafts for drafts, _ in steps), default=0)):
        tried = [accepted > place for drafts, accepted in steps if drafts > place and accepted >= place]
        if not tried:
            break
        shares.append(sum(tried) / len(tried))
    return tuple(shares)


def verdict(found: Mapping[str, Forecast]) -> str:
    """In words: on which kinds of answers drafts pay, at what depth, and on which they do not."""
    pays = [f"{task} (×{f.best.speedup:.2f} at k = {f.best.k})" for task, f in found.items() if f.pays]
    not_on = [task for task, f in found.items() if not f.pays]
    if not pays:
        return "pays on none of these"
    return f"pays on {', '.join(pays)}" + (f"; not on {', '.join(not_on)}" if not_on else "")
