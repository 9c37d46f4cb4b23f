"""How often the guesses of a source came true: what it promised against what it kept. Pure.

Every guessed token has a kind: what the source knows about how sure it is (how long a match, how deep in the draft).
The rate of a kind is learnt over all sessions; how a session does against that average is learnt beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WINDOW = 256.0  # tokens of one kind that its rate remembers, about
PRIOR = 8.0  # tokens that a rate to begin with counts for
SESSION_PRIOR = 4.0
SESSION_MEMORY = 0.9  # per answer
CERTAIN = 0.98  # nothing is more likely than that


@dataclass(frozen=True, slots=True)
class Guess:
    """An answer whose outcome is not known yet."""

    source: str
    position: int
    token_ids: tuple[int, ...]
    kinds: tuple[int, ...]


@dataclass(slots=True)
class Fit:
    """One session against the average: tokens that came true, and how many should have."""

    came_true: float = 0.0
    promised: float = 0.0

    @property
    def factor(self) -> float:
        """How much likelier than on average a guess comes true here."""
        return (self.came_true + SESSION_PRIOR) / (self.promised + SESSION_PRIOR)


class Record:
    """Of one source: the chance of a token of each kind to be what the target takes, if those before it were."""

    def __init__(self, priors: Sequence[float]) -> None:
        self.rates = list(priors)
        self._seen = [PRIOR] * len(priors)

    def chance(self, kind: int, fit: Fit) -> float:
        return min(self.rates[kind] * fit.factor, CERTAIN)

    def expected(self, kinds: Iterable[int], fit: Fit) -> list[float]:
        """Tokens expected to be accepted of the first 1, 2, ... of these: sums of products of their chances."""
        through, total, sums = 1.0, 0.0, []
        for kind in kinds:
            through *= self.chance(kind, fit)
            total += through
            sums.append(total)
        return sums

    def learn(self, guess: Guess, tokens: Sequence[int], fit: Fit) -> None:
        """Compare with what the target took, up to the first that differs or that is not known."""
        fit.came_true *= SESSION_MEMORY
        fit.promised *= SESSION_MEMORY
        truth = tokens[guess.position : guess.position + len(guess.token_ids)]
        for token, kind, true in zip(guess.token_ids, guess.kinds, truth, strict=False):
            hit = token == true
            fit.came_true += hit
            fit.promised += self.rates[kind]
            self._seen[kind] = min(self._seen[kind] + 1.0, WINDOW)
            self.rates[kind] += (hit - self.rates[kind]) / self._seen[kind]
            if not hit:
                return
