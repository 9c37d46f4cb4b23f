"""What steps and drafts cost, learned from what they took. Pure: seconds are passed in.

A step of n positions takes about a + b * n seconds: reading the weights, then work for each position. How steep that is
depends on the machine and on how many sequences run, and both are seen only in operation: so it is fitted as it goes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """What to expect of a line and of its observations. All spreads are standard deviations, as shares of y."""

    slope: float
    """First guess: one more x costs so much of what x = 1 costs."""
    slope_spread: float
    noise: float
    """Of one observation."""
    pace_walk: float
    """How far the whole line goes up or down from one observation to the next: other programs come and go."""
    slope_walk: float
    """How far the slope moves beside that, as a share of it."""
    outlier: float
    """What is further off than so many standard deviations counts as if it were just so far off."""


STEP = Kind(slope=0.06, slope_spread=0.2, noise=0.06, pace_walk=0.02, slope_walk=0.004, outlier=3.0)
TRIP = Kind(slope=0.7, slope_spread=0.5, noise=0.3, pace_walk=0.2, slope_walk=0.03, outlier=10.0)


class Line:
    """y = level + slope * x, both positive, fitted to one observation after the other (a Kalman filter).

    It knows how sure it is: while x stays the same, the line goes up and down with what is seen, and how steep it is
    becomes less and less sure; an observation at another x then corrects that at once. A pause of the
    whole machine is not what a step costs: outliers count for little.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.seen = 0
        self.level = 0.0
        self.slope = 0.0
        self._vll = self._vls = self._vss = 0.0  # variances of level and slope, and their covariance

    def at(self, x: float) -> float:
        return self.level + self.slope * x

    def spread(self, x: float) -> float:
        """Standard deviation of `at(x)`, as a share of it."""
        return math.sqrt(max(self._variance(x), 0.0)) / max(self.at(x), 1e-12)

    def see(self, x: float, y: float) -> None:
        if not self.seen:
            self._start(x, y)
        self.seen += 1
        kind, expected = self._kind, self.at(x)
        self._walk(max(self.slope, self._guess(x, expected)))
        variance = max(self._variance(x), 0.0) + (kind.noise * expected) ** 2
        most = kind.outlier * math.sqrt(variance)
        error = min(max(y - expected, -most), most)
        level, slope = self._vll + self._vls * x, self._vls + self._vss * x
        self.level += error * level / variance
        self.slope += error * slope / variance
        self._vll -= level * level / variance
        self._vls -= level * slope / variance
        self._vss -= slope * slope / variance
        self._bound(x)

    def _start(self, x: float, y: float) -> None:
        self.slope = self._guess(x, y)
        self.level = y - self.slope * x
        self._vss = (self._kind.slope_spread / self._kind.slope * self.slope) ** 2
        self._vls = -self._vss * x  # y is known here, whatever the slope
        self._vll = self._vss * x * x

    def _walk(self, slope: float) -> None:
        pace = self._kind.pace_walk**2
        self._vll += pace * self.level**2
        self._vls += pace * self.level * slope
        self._vss += pace * slope**2 + (self._kind.slope_walk * slope) ** 2

    def _guess(self, x: float, y: float) -> float:
        return self._kind.slope * y / (1.0 + self._kind.slope * (x - 1.0))

    def _bound(self, x: float) -> None:
        """Neither one more x nor none at all costs less than nothing; what was seen here stays."""
        here = max(self.at(x), 1e-12)
        self.slope = min(max(self.slope, 0.0), here / x)
        self.level = here - self.slope * x

    def _variance(self, x: float) -> float:
        return self._vll + 2.0 * self._vls * x + self._vss * x * x


@dataclass(slots=True)
class Bend:
    """How far a step without drafts is below the line that steps with drafts are on: checking the first draft costs
    more than each further one, as another kernel multiplies many rows. What counts is each kind's share of what the
    line said of it, so that it does not matter how fast the machine is at the time.
    """

    plain: float = 1.0
    drafted: float = 1.0
    seen: tuple[int, int] = (0, 0)

    SMOOTHING = 0.05
    LEAST = 0.7
    FEW = 8

    def see(self, drafts: bool, share: float) -> None:
        share = min(max(share, 0.5), 2.0)
        if drafts:
            self.drafted += (share - self.drafted) * self.SMOOTHING
        else:
            self.plain += (share - self.plain) * self.SMOOTHING
        self.seen = self.seen[0] + (not drafts), self.seen[1] + drafts

    @property
    def factor(self) -> float:
        """What a step without drafts takes, as a share of what the line says."""
        return min(max(self.plain / self.drafted, self.LEAST), 1.0) if min(self.seen) >= self.FEW else 1.0


class StepCosts:
    """Seconds of a decode step by its sequences and positions. Each power of two of sequences has a line of its own:
    what a position costs depends on how many others share the reading of the weights, and on whose KV is read.
    """

    SURE = 0.08
    LATELY = 64  # steps

    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}
        self._bends: dict[int, Bend] = {}
        self._plain: dict[int, tuple[int, int]] = {}  # steps without drafts, and which step was the last of them

    def see(self, sequences: int, positions: int, seconds: float) -> None:
        size = sequences.bit_length()
        line = self._lines.setdefault(size, Line(STEP))
        if line.seen:
            share = seconds / max(line.at(float(positions)), 1e-9)
            self._bends.setdefault(size, Bend()).see(positions > sequences, share)
        line.see(float(positions), max(seconds, 1e-9))
        if positions == sequences:
            self._plain[size] = (self._plain.get(size, (0, 0))[0] + 1, line.seen)

    def line(self, sequences: int) -> Line | None:
        """Of so many sequences, or of the number nearest to it that was seen; None before the first step."""
        size = sequences.bit_length()
        return min(self._lines.items(), key=lambda item: abs(item[0] - size), default=(0, None))[1]

    def bend(self, sequences: int) -> float:
        """Seconds of a step of so many sequences without drafts, as a share of what the line says."""
        return self._bends.get(sequences.bit_length(), Bend()).factor

    def sure(self, sequences: int) -> bool:
        """Whether it is known what a step without drafts costs: else it could not be told whether drafts pay.

        A few must have been seen, and one lately; what is inferred from others may be wrong, as no cost is a straight
        line.
        """
        size = sequences.bit_length()
        line = self._lines.get(size)
        if line is None:
            return True
        count, last = self._plain.get(size, (0, 0))
        return line.seen - last < min(4 * count, self.LATELY) and line.spread(float(sequences)) <= self.SURE
