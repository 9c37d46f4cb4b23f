"""A draft head as the source of drafts: guesses from the target's hidden state, which comes with each ask.

It keeps nothing of a sequence but the chain of guesses in hand, so it has nothing to read and is never behind; without
the hidden state it can do nothing. It does not guess ahead: from what the target says next it guesses better.

The head says of each token how likely it finds it. What such a token has been worth is learnt (`Record`), and a chain
ends where the next token would hardly be reached: checking it costs the target more than it brings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from services.drafter.record import CERTAIN, Fit, Record
from services.drafter.sessions import Session
from services.drafter.sources.adjusting import Adjusting
from services.drafter.sources.base import Wish
from services.drafter.sources.blame import Blame
from shared.messages import MAX_DRAFT, Sampling
from shared.sampling.adjustments import Adjustments
from shared.sampling.params import Row

LIKELY = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # confidence from which on a bucket begins
BUCKETS = len(LIKELY) + 1
DEPTHS = 4  # places in a draft that are told apart, the last for all deeper ones
_CHANCES = (0.07, 0.14, 0.2, 0.29, 0.38, 0.47, 0.55, 0.63, 0.74, 0.88, 0.95)  # as measured: a little less than it says
PRIORS = _CHANCES * DEPTHS
GOES_ON = 0.7  # a step for a guess that would have to be surer than that to be worth checking is not made
REACHED = 0.4  # chance of a guess to be of use, per place, to begin with
SMOOTHING = 0.1
MOST = 4.0  # a step that took so many times as long as usual counts as if it had been that
MAX_ROWS = 64  # of a step: bounds its time and memory, whatever is asked at once
TRIED = 32  # wishes left without a guess, after which one is made nevertheless: it may have got better


class HeadFacts(Protocol):
    @property
    def hidden_size(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...


class Head(Protocol):
    """What `shared.engine.draft_head.DraftHead` does. Features are its own affair."""

    @property
    def info(self) -> HeadFacts: ...

    def start(self, hidden: Sequence[bytes]) -> Any: ...

    def step(
        self, features: Any, windows: Sequence[Sequence[int]], rows: Sequence[Row]
    ) -> tuple[list[int], list[float], Any]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `features`: of each session, or its hidden state as it came where there are none yet."""

    sessions: tuple[Session, ...]
    features: tuple[Any, ...]
    windows: tuple[tuple[int, ...], ...]
    rows: tuple[Row, ...]


Guess = tuple[int, float, Any]
"""A token, how likely the head finds it, and the features to go on from."""


@dataclass(slots=True, eq=False)
class Chain:
    """Guesses that follow a wish."""

    wish: Wish
    wanted: int
    adjustments: Adjustments | None
    features: Any
    guesses: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    through: float = 1.0
    """Chance that all guesses are right."""
    ended: bool = False

    @property
    def done(self) -> bool:
        return self.ended or len(self.guesses) >= self.wanted


def usable(hidden: bytes, channels: int) -> bool:
    """Whether it is a hidden state of so many channels: float16, little-endian, finite."""
    return len(hidden) == 2 * channels and bool(np.isfinite(np.frombuffer(hidden, dtype="<f2")).all())


def kind_of(likely: float, depth: int) -> int:
    """Of the guess in place `depth` (0: the first), which the head finds so likely."""
    return min(depth, DEPTHS - 1) * BUCKETS + sum(likely >= least for least in LIKELY)


class HeadSource:
    """One chain per session at most."""

    name = "head"
    works_ahead = False

    def __init__(self, head: Head) -> None:
        self.record = Record(PRIORS)
        self._head = head
        self._chains: dict[Session, Chain] = {}
        self._wishes: dict[Session, tuple[Wish, int]] = {}  # that no plan has taken in, and how many guesses
        self._adjusting: dict[Session, Adjusting] = {}
        self._ended: list[Session] = []
        self._blame = Blame()
        self._reached = [REACHED ** (depth + 1) for depth in range(MAX_DRAFT)]
        """How likely a guess in each place was of use, over all chains, also those that ended before."""
        self._without = 0
        self.step_s = self._measure()

    def _measure(self) -> float:
        """Seconds of a step, the first of which warm up."""
        hidden, row = bytes(2 * self.hidden_size), Row(Sampling(temperature=0.0), 0, 1)
        took = []
        for _ in range(5):
            started = time.monotonic()
            self._head.step(self._head.start([hidden]), [(0,)], [row])
            took.append(max(time.monotonic() - started, 1e-6))
        return min(took)

    # At any time

    @property
    def hidden_size(self) -> int:
        return self._head.info.hidden_size

    @property
    def asked(self) -> bool:
        return bool(self._wishes or self._ended)

    def room(self, wish: Wish) -> int:
        return 0 if not wish.hidden or wish.session in self._blame.barred else wish.most

    def reach(self, wish: Wish, depth: int) -> int:
        """All there is room for: it ends where it is not sure enough."""
        return self.room(wish) if depth else 0

    def expected(self, wish: Wish) -> list[float]:
        """Before there are guesses, as many as were of use in such places so far."""
        fit = wish.session.fits[self.name]
        if (chain := self._chains.get(wish.session)) is not None and chain.wish is wish and chain.guesses:
            return self.record.expected(chain.kinds, fit)
        total, sums = 0.0, []
        for reached in self._reached[: self.room(wish)]:
            total += min(reached * fit.factor, CERTAIN)
            sums.append(total)
        return sums

    def behind(self, wish: Wish) -> float:
        return 0.0

    def ready(self, wish: Wish) -> list[int]:
        chain = self._chains.get(wish.session)
        return chain.guesses[: wish.most] if chain is not None and chain.wish is wish else []

    def kinds(self, wish: Wish, count: int) -> tuple[int, ...]:
        chain = self._chains.get(wish.session)
        return tuple(chain.kinds[:count]) if chain is not None and chain.wish is wish else ()

    def want(self, wish: Wish, depth: int) -> None:
        """With depth 0 there is nothing to do."""
        if count := min(depth, self.room(wish)):
            self._wishes[wish.session] = (wish, count)

    def waits(self, wish: Wish) -> bool:
        if (queued := self._wishes.get(wish.session)) is not None:
            return queued[0] is wish
        chain = self._chains.get(wish.session)
        return chain is not None and chain.wish is wish and not chain.done

    def answered(self, wish: Wish) -> None:
        queued, chain = self._wishes.get(wish.session), self._chains.get(wish.session)
        if queued is not None and queued[0] is wish:
            del self._wishes[wish.session]
        if chain is not None and chain.wish is wish:
            chain.wanted = 0

    def end(self, session: Session) -> None:
        self._wishes.pop(session, None)
        self._ended.append(session)

    # Steps

    def plan(self) -> Plan | None:
        self._take_in()
        self._chains = {session: chain for session, chain in self._chains.items() if chain.wanted}
        going = [session for session, chain in self._chains.items() if not chain.done]
        if not going:
            return None
        going = list(self._blame.turn(going))[:MAX_ROWS]
        chains = [self._chains[session] for session in going]
        return Plan(
            tuple(going),
            tuple(chain.features for chain in chains),
            tuple(self._window(chain) for chain in chains),
            tuple(_row(chain) for chain in chains),
        )

    def run(self, plan: Plan) -> tuple[Sequence[Guess], float]:
        """Blocking; raises what the head raises."""
        started = time.monotonic()
        given = [f for f in plan.features if isinstance(f, bytes)]
        begun = iter(self._head.start(given)) if given else iter(())
        features = [next(begun) if isinstance(f, bytes) else f for f in plan.features]
        tokens, likely, following = self._head.step(features, plan.windows, plan.rows)
        return list(zip(tokens, likely, following, strict=True)), time.monotonic() - started

    def commit(self, plan: Plan, out: Sequence[Guess], seconds: float) -> None:
        # A stall of the whole machine is no step: it would be long before another is tried.
        self.step_s += (min(seconds, MOST * self.step_s) - self.step_s) * SMOOTHING
        self._blame.passed(plan.sessions)
        for session, (token, likely, features) in zip(plan.sessions, out, strict=True):
            chain = self._chains[session]
            self._add(chain, token, likely, session.fits[self.name])
            chain.features = features
            if chain.done and chain.wanted:
                self._learn(chain)

    def fail(self, plan: Plan, error: Exception) -> None:
        for session in self._blame.failed(plan.sessions, error):
            self._drop(session)
            self._wishes.pop(session, None)

    def _take_in(self) -> None:
        ended, self._ended = self._ended, []
        for session in ended:
            self._drop(session)
            self._blame.ended(session)
        wishes, self._wishes = self._wishes, {}
        for session, (wish, count) in wishes.items():
            adjusting = self._adjusting.setdefault(session, Adjusting())
            adjustments = adjusting.at(wish, self._head.info.eos_ids)
            self._chains[session] = Chain(wish, count, adjustments, wish.hidden)

    def _window(self, chain: Chain) -> tuple[int, ...]:
        """The last tokens, the newest first."""
        wish, size = chain.wish, self._head.info.window
        known = wish.tokens[max(wish.length - size, 0) : wish.length] + chain.guesses
        return tuple(known[: -size - 1 : -1])

    def _add(self, chain: Chain, token: int, likely: float, fit: Fit) -> None:
        """Take a guess in, unless it is hardly worth checking."""
        kind = kind_of(likely, len(chain.guesses))
        through = chain.through * self.record.chance(kind, fit)
        if through < chain.wish.least:
            chain.ended = True
            self._without += not chain.guesses
            if chain.guesses or self._without % TRIED:
                return
        chain.through = through
        chain.guesses.append(token)
        chain.kinds.append(kind)
        chain.ended = token in self._head.info.eos_ids or through * GOES_ON < chain.wish.least

    def _learn(self, chain: Chain) -> None:
        """How far chains reach on average, whatever they come upon."""
        through = 1.0
        for depth in range(min(chain.wanted, MAX_DRAFT)):
            through *= self.record.rates[chain.kinds[depth]] if depth < len(chain.kinds) else 0.0
            self._reached[depth] += (through - self._reached[depth]) * SMOOTHING

    def _drop(self, session: Session) -> None:
        self._chains.pop(session, None)
        self._adjusting.pop(session, None)


def _row(chain: Chain) -> Row:
    wish = chain.wish
    position = wish.length + len(chain.guesses)
    return Row(wish.sampling, wish.sampling.seed or 0, position, chain.adjustments, tuple(chain.guesses))
