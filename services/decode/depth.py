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
from itertools import accumulate
from operator import mul

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
class Trust:
    """What came true against what a drafter had said of its drafts."""

    came: float = 0.0
    said: float = 0.0

    FADING = 0.99
    """Per draft."""
    PRIOR = 4.0
    """Drafts that it is believed for to begin with."""

    def see(self, said: float, hit: bool) -> None:
        self.came = self.came * self.FADING + hit
        self.said = self.said * self.FADING + said

    @property
    def factor(self) -> float:
        """By which to multiply what it says. It is not believed to be better than it says by much: it would know."""
        return min((self.came + self.PRIOR) / (self.said + self.PRIOR), 1.25)


Rates = tuple[Rate, Rate, Rate]
"""Of the first draft of an answer to be right; of each later one if those before it were; and of there being a later
one when it had been wanted and those before it were right."""


@dataclass(slots=True)
class Acceptance:
    """What to expect of a drafter's answers for one sequence, or (`common` is None) for all.

    A source that repeats what it found elsewhere is wrong at once, or right for long: so the first draft and later ones
    have rates of their own. They tell whether asking pays. Of drafts that are here the drafter itself says more.
    """

    memory: float
    common: Acceptance | None = None
    rates: dict[str, Rates] = field(default_factory=dict)
    shares: dict[str, Rate] = field(default_factory=dict)
    """How often an answer comes from each source."""
    trust: dict[str, Trust] = field(default_factory=dict)
    """By source, kept for all sequences together."""

    FIRST, LATER, MORE = 0.4, 0.6, 1.0
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

    def see(self, source: str, index: int, hit: bool, said: float | None = None) -> None:
        """Draft number `index` of an answer, those before it being right, was right or not.

        `said`: how likely that was in the drafter's own opinion.
        """
        source = self._name(source)
        rates = self.rates.setdefault(source, (self._new_rate(), self._new_rate(), self._new_rate()))
        rates[index > 0].see(hit)
        if index:
            rates[2].see(True)
        if self.common:
            self.common.see(source, index, hit, said)
        elif said is not None:
            self.trust.setdefault(source, Trust()).see(said, hit)

    def ended(self, source: str) -> None:
        """All drafts of an answer were right, and there were fewer than had been asked for."""
        source = self._name(source)
        if rates := self.rates.get(source):
            rates[2].see(False)
        if self.common:
            self.common.ended(source)

    def held(self, source: str, index: int, count: int, said: Seq[float] = ()) -> list[float]:
        """Chance that the first 1, 2, … `count` of an answer's drafts from number `index` on are right.

        `said`: of each, if those before it are, in the drafter's own opinion.
        """
        source = self._name(source)
        if not said:
            first, later, _ = self._rates(source)
            return [(later if index else first) * later**place for place in range(count)]
        factor = trust.factor if (trust := (self.common or self).trust.get(source)) else 1.0
        return list(accumulate((min(chance * factor, 1.0) for chance in said[:count]), mul))

    def asked(self, count: int) -> tuple[list[float], list[float]]:
        """The same for the drafts that would come if the drafter were asked, and how likely it is that they come."""
        sources = {s: share for s, share in self._shares().items() if s != NOTHING}
        if not self._shares():
            sources = {OTHER: 1.0}
        right, coming = [0.0] * count, [0.0] * count
        for source, share in sources.items():
            first, later, more = self._rates(source)
            there = share
            for place in range(count):
                coming[place] += there
                right[place] += there * (later if place else first)
                there *= (later if place else first) * more
        return right, coming

    def _name(self, source: str) -> str:
        common = self.common or self
        return source if source in common.shares or len(common.shares) < MAX_SOURCES else OTHER

    def _rates(self, source: str) -> tuple[float, float, float]:
        """Of `Rates`."""
        prior = self.common._rates(source) if self.common else (self.FIRST, self.LATER, self.MORE)
        if rates := self.rates.get(source):
            return rates[0].given(prior[0]), rates[1].given(prior[1]), rates[2].given(prior[2])
        return prior

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
    seconds; `coming`: the chance that there is one at all at that place, for only then is it checked (empty: always).
    """

    held: Seq[float] = ()
    asked: Seq[float] = ()
    arrival: Seq[float] = ()
    coming: Seq[float] = ()


@dataclass(frozen=True, slots=True)
class Allotment:
    """`depths[i]` drafts for prospect i; waiting longer than `wait` seconds for them costs more than they bring."""

    depths: list[int]
    wait: float


def allot(prospects: Seq[Prospect], cost: Line, room: int, longest_wait: float, bend: float = 1.0) -> Allotment:
    """Depths, at most `room` in all, for the most tokens per second; `cost`: seconds of a step by its positions.

    `bend`: a step without any drafts takes this share of what `cost` says.
    """
    tokens = float(len(prospects))
    seconds = cost.at(tokens) * bend
    best = _Fill([0] * len(prospects), tokens, seconds, tokens / max(seconds, 1e-12))
    best = max(best, _fill(prospects, cost, room, 0.0), key=lambda fill: fill.rate)
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

    Places are taken by falling chance, of those drafts that there are, while they raise the rate. As the step's cost is
    a straight line, the rate falls from the first one on that does not, so this is the best of all choices.
    """
    depths = [0] * len(prospects)
    tokens = float(len(prospects))
    seconds = cost.at(tokens)
    heap = [(*_place(p, 0, wait), i) for i, p in enumerate(prospects)]
    heapq.heapify(heap)
    for _ in range(room if heap else 0):
        negative, there, i = heap[0]
        if -negative < HOPELESS or -negative * (seconds + wait) <= tokens * cost.slope:
            break
        tokens -= negative * there
        seconds += cost.slope * there
        depths[i] += 1
        heapq.heapreplace(heap, (*_place(prospects[i], depths[i], wait), i))
    return _Fill(depths, tokens, seconds, tokens / (seconds + wait))


def _place(prospect: Prospect, place: int, wait: float) -> tuple[float, float]:
    """Minus the chance of the draft there, if there is one, and how likely there is: of those that are here, or of
    those that are here after `wait`, whichever bring more."""
    held = prospect.held[place] if place < len(prospect.held) else 0.0
    if place < len(prospect.asked) and prospect.arrival[place] <= wait and prospect.asked[place] > held:
        there = prospect.coming[place] if prospect.coming else 1.0
        return -prospect.asked[place] / max(there, 1e-9), there
    return -held, 1.0
