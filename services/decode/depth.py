"""How many tokens to draft for each sequence: what is expected to come true against what it costs. Pure.

A step that verifies k drafts brings 1 + s_1 + … + s_k tokens, s_j being the chance that the first j are right
(Leviathan et al. 2023, "Fast inference from transformers via speculative decoding"). All sequences of a batch share the
step, so depths are chosen together, for the most tokens per second of the batch (as in Liu et al. 2024, "Optimizing
speculative decoding for serving large language models using goodput").
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from services.decode.costs import Line

MAX_SOURCES = 8
OTHER = "other"
"""Sources are named by whoever answers: beyond `MAX_SOURCES` they are not told apart."""
NOTHING = ""
"""The source of an answer without drafts."""
HOPELESS = 0.01
GRAIN = 0.01  # of a step


DOUBT = 2.0
"""What others have shown counts like so many observations of one's own."""


@dataclass(slots=True)
class Rate:
    """How often something came true, over about the last `memory` times.

    Text turns from quotation to prose and back. So when the same comes so often in a row that this is less likely than
    `SURPRISE`, each further time counts half of all there is (unless `steady`, as for many texts at once).
    """

    memory: float
    steady: bool = False
    value: float = 0.0
    seen: int = 0
    span: float = 0.0
    """Times that are remembered."""
    last: bool = False
    odds: float = 1.0
    """How likely it was that the same came as often as it did of late."""

    SURPRISE = 0.003

    def see(self, hit: bool) -> None:
        expected = min(max(self.value, 0.05), 0.95)  # never so sure that a single time is a surprise
        self.odds = (self.odds if hit == self.last else 1.0) * (expected if hit else 1.0 - expected)
        self.last = hit
        if self.odds < self.SURPRISE and not self.steady:
            self.span = min(self.span, 1.0)
        self.seen += 1
        self.span = min(self.span + 1.0, self.memory)
        self.value += (float(hit) - self.value) / self.span

    def given(self, prior: float) -> float:
        return (self.value * self.seen + prior * DOUBT) / (self.seen + DOUBT)


@dataclass(slots=True)
class Acceptance:
    """What to expect of a drafter's answers for one sequence, or (`common` is None) for all.

    Two rates for each source: of the first draft of an answer, and of each later one if those before it were right. A
    source that repeats what it found elsewhere is wrong at once, or right for long.
    """

    memory: float
    common: Acceptance | None = None
    rates: dict[str, tuple[Rate, Rate]] = field(default_factory=dict)
    shares: dict[str, Rate] = field(default_factory=dict)
    """How often an answer comes from each source."""

    FIRST, LATER = 0.4, 0.6
    """Before anything is known."""

    def child(self, memory: float) -> Acceptance:
        """Of one sequence: expected to be as others are, until it shows otherwise."""
        return Acceptance(memory, self)

    def answered(self, source: str) -> None:
        """An answer came from this source, or held nothing (`NOTHING`)."""
        source = self._name(source)
        self.shares.setdefault(source, self._new_share())
        for known, rate in self.shares.items():
            rate.see(known == source)
        if self.common:
            self.common.answered(source)

    def see(self, source: str, index: int, hit: bool) -> None:
        """Draft number `index` of an answer, those before it being right, was right or not."""
        source = self._name(source)
        pair = self.rates.setdefault(source, (self._new_rate(), self._new_rate()))
        pair[index > 0].see(hit)
        if self.common:
            self.common.see(source, index, hit)

    def held(self, source: str, index: int, count: int) -> list[float]:
        """Chance that the first 1, 2, … `count` of an answer's drafts from number `index` on are right."""
        first, later = self._rates(self._name(source))
        chance = later if index else first
        return [chance * later**place for place in range(count)]

    def asked(self, count: int) -> list[float]:
        """The same for the drafts that would come if the drafter were asked."""
        sources = {s: share for s, share in self._shares().items() if s != NOTHING}
        if not self._shares():
            sources = {OTHER: 1.0}
        held = [(share, self.held(source, 0, count)) for source, share in sources.items()]
        return [sum(share * chances[place] for share, chances in held) for place in range(count)]

    def _name(self, source: str) -> str:
        common = self.common or self
        return source if source in common.shares or len(common.shares) < MAX_SOURCES else OTHER

    def _rates(self, source: str) -> tuple[float, float]:
        first, later = self.common._rates(source) if self.common else (self.FIRST, self.LATER)
        if pair := self.rates.get(source):
            return pair[0].given(first), pair[1].given(later)
        return first, later

    def _shares(self) -> dict[str, float]:
        if self.common is None:
            return {source: rate.value for source, rate in self.shares.items()}
        new = self._new_share()
        return {s: self.shares.get(s, new).given(share) for s, share in self.common._shares().items()}

    def _new_share(self) -> Rate:
        """Of a source that none of the answers so far came from."""
        new = self._new_rate()
        new.seen = max((r.seen for r in self.shares.values()), default=0)
        new.span = min(float(new.seen), self.memory)
        return new

    def _new_rate(self) -> Rate:
        return Rate(self.memory, steady=self.common is None)


@dataclass(frozen=True, slots=True)
class Prospect:
    """What drafts may bring a sequence, place by place: the chance that all up to there are right. Never rising.

    `held`: of drafts that are here. `asked`: of those that asking brings, the first j of them after `arrival[j - 1]`
    seconds.
    """

    held: Seq[float] = ()
    asked: Seq[float] = ()
    arrival: Seq[float] = ()


@dataclass(frozen=True, slots=True)
class Allotment:
    """`depths[i]` drafts for prospect i; waiting longer than `wait` seconds for them costs more than they bring."""

    depths: list[int]
    wait: float


def allot(prospects: Seq[Prospect], cost: Line, room: int, longest_wait: float) -> Allotment:
    """Depths, at most `room` in all, for the most tokens per second; `cost`: seconds of a step by its positions."""
    best = _fill(prospects, cost, room, 0.0)
    base = best.rate
    for wait in _waits(prospects, longest_wait, GRAIN * best.seconds):
        best = max(best, _fill(prospects, cost, room, wait), key=lambda fill: fill.rate)
    return Allotment(best.depths, min(longest_wait, max(best.tokens / base - best.seconds, 0.0)))


def _waits(prospects: Seq[Prospect], longest: float, grain: float) -> list[float]:
    """The waits worth comparing: when something arrives; of those less than `grain` apart the longest."""
    out: list[float] = []
    for wait in sorted({a for p in prospects for a in p.arrival if a <= longest}, reverse=True):
        if not out or wait <= out[-1] - grain:
            out.append(wait)
    return out


@dataclass(frozen=True, slots=True)
class _Fill:
    depths: list[int]
    tokens: float
    seconds: float
    """Of the step, without the wait."""
    rate: float


def _fill(prospects: Seq[Prospect], cost: Line, room: int, wait: float) -> _Fill:
    """The best depths for a step that waits so long.

    Places are taken by falling chance while they raise the rate. As the step's cost is a straight line, the rate falls
    from the first one on that does not, so this is the best of all choices.
    """
    depths = [0] * len(prospects)
    tokens = float(len(prospects))
    seconds = cost.at(tokens)
    heap = [(-_chance(p, 0, wait), i) for i, p in enumerate(prospects)]
    heapq.heapify(heap)
    for _ in range(room if heap else 0):
        negative, i = heap[0]
        if -negative < HOPELESS or -negative * (seconds + wait) <= tokens * cost.slope:
            break
        tokens -= negative
        seconds += cost.slope
        depths[i] += 1
        heapq.heapreplace(heap, (-_chance(prospects[i], depths[i], wait), i))
    return _Fill(depths, tokens, seconds, tokens / (seconds + wait))


def _chance(prospect: Prospect, place: int, wait: float) -> float:
    """From whichever is better: the drafts here, or those that are here after `wait`."""
    held = prospect.held[place] if place < len(prospect.held) else 0.0
    if place < len(prospect.asked) and prospect.arrival[place] <= wait:
        return max(held, prospect.asked[place])
    return held
