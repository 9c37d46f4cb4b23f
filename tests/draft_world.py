"""Decoding with drafts in simulated time: known costs, known chances, and the real bookkeeping in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.decode.drafters import Ask
from services.decode.sequence import Sequence as Decoding
from services.decode.speculation import DraftBook
from shared.cache.naming import Lineage
from shared.lifecycle import Phase
from shared.messages import Draft, Sampling

WRONG = 999
MS = 1e-3


def decoding(tokens: Sequence[int], max_tokens: int = 50, name: str = "s") -> Decoding:
    """A sequence that is about to generate."""
    made = Decoding(name, list(tokens), len(tokens), Lineage(b"r" * 32, "default"), max_tokens, Sampling(), 7)
    made.phase = Phase.READY
    made.computed = len(tokens) - 1
    return made


def cpu(sequences: int, positions: int) -> float:
    """Two cores, 135M parameters, as measured."""
    return (43 + 3.2 * (positions - 1) + 1.0 * (sequences - 1)) * MS


def gpu(sequences: int, positions: int) -> float:
    """Nearly flat, then steep."""
    return (9 + 0.01 * positions + 0.08 * max(positions - 48, 0)) * MS


def steep(sequences: int, positions: int) -> float:
    """Every position costs nearly as much as the first."""
    return (3 + 12 * positions) * MS


def lookup(items: int, k: int) -> float:
    return (1.2 + 0.1 * items) * MS


def small_model(items: int, k: int) -> float:
    return (1.5 + (3.0 + 0.2 * items) * k) * MS


Trip = Callable[[int, int], float]
"""By sequences and depth: seconds from an ask to its answer."""
Chances = Callable[[int], tuple[float, float]]
"""By tokens generated: the chances that the first draft is right, and each later one if those before it are."""


@dataclass
class World:
    """One decode worker and its drafters. `frozen(now)`: the drafter does not get to run."""

    step: Callable[[int, int], float] = cpu
    trip: Trip = lookup
    noise: float = 0.05
    stolen: float = 0.0
    """So much of the time that a drafter works beside a step, the step takes longer."""
    seed: int = 0
    frozen: Callable[[float], float] = lambda now: 0.0
    """Seconds until the drafter runs again."""
    drafters: list[str] = field(default_factory=lambda: ["d"])
    now: float = 0.0
    asked: int = 0
    probes: int = 0
    drafted: int = 0
    waited: float = 0.0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._answers: list[tuple[float, Ask, list[Draft], float]] = []

    def book(self, depth: int = 8, *, longest_wait: float = 0.05, step_tokens: int = 256) -> DraftBook:
        return DraftBook(depth, 1000, longest_wait=longest_wait, step_tokens=step_tokens)

    def run(self, book: DraftBook, live: dict[str, tuple[Decoding, Chances]], seconds: float) -> float:
        """Generate for so long; returns tokens per second."""
        started, tokens = self.now, 0
        while self.now - started < seconds:
            tokens += self.once(book, live)
            for name in [n for n, (s, _) in live.items() if s.generated >= s.max_tokens]:
                book.end(name)
                del live[name]
        return tokens / (self.now - started)

    def once(self, book: DraftBook, live: dict[str, tuple[Decoding, Chances]]) -> int:
        generating = [s for s, _ in live.values()]
        asks, wait = book.plan(generating, self.drafters)
        self._wait(book, asks, wait, live)
        probes = book.probes(generating)
        self.probes += len(probes)
        busy = sum(self._send(ask, live) for ask in probes)
        book.settle(generating)
        return self._step(book, live, busy)

    def _wait(self, book: DraftBook, asks: list[Ask], wait: float, live: dict[str, tuple[Decoding, Chances]]) -> None:
        began = self.now
        for ask in asks:
            self.asked += 1
            self._send(ask, live)
        due = max((at for at, a, *_ in self._answers if a in asks), default=self.now)
        self.now = min(due, self.now + wait)
        self._deliver(book)
        self.waited += self.now - began
        for ask in asks:
            if any(a is ask for _, a, *_ in self._answers):
                book.missed(ask)

    def _send(self, ask: Ask, live: dict[str, tuple[Decoding, Chances]]) -> float:
        busy = self.trip(len(ask.items), ask.depth) * self._noisy()
        took = busy + self.frozen(self.now)
        drafts = [self._draft(i.session, i.base + len(i.token_ids), i.k, live[i.session][1]) for i in ask.items]
        self._answers.append((self.now + took, ask, drafts, took))
        return busy

    def _deliver(self, book: DraftBook) -> None:
        for answer in sorted((a for a in self._answers if a[0] <= self.now), key=lambda a: a[0]):
            self._answers.remove(answer)
            _, ask, drafts, took = answer
            assert book.answered(ask, drafts, [], took) == 0

    def _draft(self, name: str, position: int, k: int, chances: Chances) -> Draft:
        tokens = []
        first, later = chances(position - 1)
        right = self.rng.random() < first
        for place in range(position, position + k):
            tokens.append(truth(name, place) if right else WRONG)
            right = right and self.rng.random() < later
        return Draft(session=name, position=position, token_ids=tokens, source="x")

    def _step(self, book: DraftBook, live: dict[str, tuple[Decoding, Chances]], busy: float) -> int:
        drafts = sum(len(s.drafts) for s, _ in live.values())
        self.drafted += drafts
        took = self.step(len(live), len(live) + drafts) * self._noisy() + busy * self.stolen
        self.now += took
        made = sum(advance(s) for s, _ in live.values())
        self._deliver(book)
        book.stepped(len(live), len(live) + drafts, took)
        return made

    def _noisy(self) -> float:
        return max(self.rng.gauss(1.0, self.noise), 0.5)


def truth(name: str, position: int) -> int:
    return (hash_of(name) + position * 37) % 900


def hash_of(name: str) -> int:
    return sum(map(ord, name))


def advance(sequence: Decoding) -> int:
    """Verify the drafts, as the scheduler does."""
    made = 0
    for draft in (*sequence.drafts, None):
        sequence.tokens.append(truth(sequence.id, len(sequence.tokens)))
        made += 1
        if draft != sequence.tokens[-1] or sequence.generated >= sequence.max_tokens:
            break
    sequence.computed = len(sequence.tokens) - 1
    sequence.drafts = ()
    return made


def batch(count: int, chances: Chances, tokens: int = 100_000) -> dict[str, tuple[Decoding, Chances]]:
    return {f"s{n}": (decoding([1, 2, 3], tokens, f"s{n}"), chances) for n in range(count)}


def fixed(world: World, k: int, count: int, first: float, later: float) -> float:
    """Expected tokens per second of `count` sequences that always ask for k drafts and wait for them."""
    expected = 1.0 + sum(first * later**j for j in range(k))
    wait = world.trip(count, k) if k else 0.0
    return count * expected / (world.step(count, count * (1 + k)) + wait)
