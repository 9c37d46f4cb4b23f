"""For whom the draft model is worth waiting, and how long. Pure: no I/O, no clock, no torch.

An instant answer costs nothing. Waiting for `n` steps of the model delays the asker's whole batch, so what counts is
the batch's tokens per second: (sequences + drafts expected to be accepted) / (time of the asker's step + time waited).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

PASSES = 64  # wishes passed over before the model is tried again
MAX_PASSES = 4096
CHEAP_PASSES, CHEAP_MAX_PASSES = 32, 512
TRIAL = 12  # wishes of one trial
BACKGROUND = 0.5
MAX_ASKERS = 256
SMOOTHING = 0.2
IDLE_S = 1.0  # an asker silent for longer was not computing


@dataclass(frozen=True, slots=True)
class Option:
    """What can be had for one wish. Numbers of accepted tokens are expectations."""

    instant: float
    """Accepted tokens of the instant answer; 0 without one."""
    model: Sequence[float]
    """Accepted tokens of the model's first 1, 2, ... guesses, as many as may be had at all."""
    ready: int
    """Guesses that the model has made already."""
    behind: float
    """Steps of the model until its first new guess, beyond that one's own step."""

    def depth(self, steps: int) -> int:
        """Guesses there are after waiting for so many steps."""
        return min(self.ready + max(steps - int(self.behind), 0), len(self.model))

    def accepted(self, steps: int) -> tuple[float, int]:
        """The better of both sources after `steps`: accepted tokens, and the model's depth (0: the instant answer)."""
        depth = self.depth(steps)
        by_model = self.model[depth - 1] if depth else 0.0
        return (by_model, depth) if by_model > self.instant else (self.instant, 0)


def choose(options: Sequence[Option], *, asker_s: float, step_s: float, budget_s: float) -> list[int]:
    """For each wish of one ask the model's guesses to wait for; 0: take the instant answer."""
    most = max((len(o.model) + int(o.behind) for o in options), default=0)
    best_rate, best_steps = -1.0, 0
    for steps in range(int(min(most, budget_s / step_s)) + 1):
        gain = len(options) + sum(o.accepted(steps)[0] for o in options)
        rate = gain / (asker_s + steps * step_s)
        if rate > best_rate:
            best_rate, best_steps = rate, steps
    return [o.accepted(best_steps)[1] for o in options]


def worth_working(option: Option, *, asker_s: float, step_s: float) -> bool:
    """Whether the model should read and guess ahead for a wish that it does not answer, to be in time for later ones.

    Its steps may slow down the asker's, with which it may share a machine: by `BACKGROUND` of their time.
    """
    return bool(option.model) and option.model[-1] - option.instant > BACKGROUND * step_s / asker_s


@dataclass(slots=True)
class Trials:
    """When a model that did not pay is tried again: ever more seldom while it goes on not paying."""

    passed: int = 0
    left: int = 0
    least: int = PASSES
    most: int = MAX_PASSES
    interval: int = PASSES

    @classmethod
    def cheap(cls) -> Trials:
        """Of a source that is no burden to anybody while it is not asked, and hardly one when it is."""
        return cls(least=CHEAP_PASSES, most=CHEAP_MAX_PASSES, interval=CHEAP_PASSES)

    def paid(self) -> None:
        self.passed, self.interval, self.left = 0, self.least, 0

    def due(self) -> bool:
        """One wish is passed over; True if it is to be drafted for nevertheless."""
        if self.left:
            self.left -= 1
            return True
        self.passed += 1
        if self.passed >= self.interval:
            self.passed, self.left = 0, TRIAL
            self.interval = min(self.interval * 2, self.most)
        return False


@dataclass(slots=True)
class Asker:
    answered_at: float | None = None
    step_s: float | None = None


@dataclass(slots=True)
class Askers:
    """How long each decode worker computes between an answer and its next ask."""

    _known: OrderedDict[str, Asker] = field(default_factory=OrderedDict)

    def asks(self, worker: str, now: float) -> float | None:
        """Its step time as far as it is known, in seconds."""
        asker = self._known.setdefault(worker, Asker())
        self._known.move_to_end(worker)
        if len(self._known) > MAX_ASKERS:
            self._known.popitem(last=False)
        if asker.answered_at is not None and (took := now - asker.answered_at) < IDLE_S:
            asker.step_s = took if asker.step_s is None else asker.step_s + (took - asker.step_s) * SMOOTHING
        asker.answered_at = None
        return asker.step_s

    def answered(self, worker: str, now: float) -> None:
        if (asker := self._known.get(worker)) is not None:
            asker.answered_at = now
