"""What a decode worker knows of a drafter: how fast it answers, whether it does, how often it is right. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from services.decode.costs import TRIP, Line
from services.decode.depth import Acceptance
from shared.messages import Beat, DraftItem

PAUSE = 4  # steps; doubled with every ask that is lost in a row
MAX_PAUSE = 256
COMMON_MEMORY = 64.0
LEAST = 0.1  # chance that a draft must have to be worth checking, where it is not known what that costs
UNREAD = 128
"""A drafter that has to read more tokens than that before it can answer is not waited for."""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """What a drafter is asked in one message. `awaited`: the step waits for the answer, else it goes on meanwhile.

    `paid`: the answer's time counts against what asking on suspicion may cost. `least`: see `DraftAsk`.
    """

    drafter: str
    items: list[DraftItem]
    awaited: bool
    paid: bool = False
    least: float = LEAST

    @property
    def depth(self) -> int:
        return max(i.k for i in self.items)

    @property
    def largest(self) -> DraftItem:
        """By bytes, about: 3 for a token, 16 for a bias."""
        return max(self.items, key=lambda i: 3 * len(i.token_ids) + 16 * len(i.sampling.logit_bias) + len(i.hidden))

    @property
    def told(self) -> int:
        """Tokens that one of the sequences was told of, at most."""
        return max(len(i.token_ids) for i in self.items)


@dataclass(slots=True)
class DrafterState:
    """At most two asks are open, one of either kind: a drafter that is slow or stuck is not buried in asks.

    A drafter that let a step wait in vain is in doubt: no step waits for it until it has answered something, however
    late. So one that is stuck costs one wait, and one that wakes up is back with its first answer.
    """

    trips: dict[int, Line] = field(default_factory=dict)
    """Seconds from ask to answer, by the drafts of the longest of it: one for each power of two of sequences."""
    heard: int = 0
    """Answers that those lines are made of."""
    in_time: float = 1.0
    """Share of answers, of late, that came while they were awaited, or would have."""
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(COMMON_MEMORY))
    """Of its answers for all sequences."""
    open: dict[bool, Ask] = field(default_factory=dict)
    """By `Ask.awaited`."""
    doubted: bool = False
    pause: int = 0
    resume_at: int = 0

    def answered(self, ask: Ask, drafts: int, seconds: float, in_time: bool) -> None:
        """`drafts`: of one sequence, at most."""
        self.closed(ask)
        self.doubted, self.pause, self.resume_at = False, 0, 0
        if ask.told > UNREAD:
            return  # says nothing of what comes after it
        self.in_time += (float(in_time) - self.in_time) / 8.0
        self.heard += 1
        line = self.trips.setdefault(len(ask.items).bit_length(), Line(TRIP))
        line.see(float(max(drafts, 1)), max(seconds, 1e-9))

    def lost(self, ask: Ask, step: int) -> None:
        self.closed(ask)
        self.doubted = True
        self.pause = min(max(2 * self.pause, PAUSE), MAX_PAUSE)
        self.resume_at = step + self.pause

    def closed(self, ask: Ask) -> None:
        if self.open.get(ask.awaited) is ask:
            del self.open[ask.awaited]

    def may_wait(self) -> bool:
        return not self.doubted and True not in self.open

    def may_probe(self, step: int) -> bool:
        return False not in self.open and not (self.doubted and self.open) and step >= self.resume_at

    def arrivals(self, sequences: int, depth: int, in_vain: float) -> Seq[float]:
        """Seconds that a step waits, on average, if 1, 2, … `depth` drafts come for each of so many sequences;
        `in_vain` if the answer is late."""
        size, late = sequences.bit_length(), (1.0 - self.in_time) * in_vain
        nearest = min(self.trips.items(), key=lambda item: abs(item[0] - size), default=(size, Line(TRIP)))[1]
        return [late + self.in_time * max(nearest.at(float(k)), 0.0) for k in range(1, depth + 1)]


def readers(drafters: Iterable[Beat], hidden_size: int) -> frozenset[str]:
    """Those that read hidden states of `hidden_size` channels; none of no channels."""
    return frozenset(beat.worker for beat in drafters if hidden_size and beat.hidden_size == hidden_size)
