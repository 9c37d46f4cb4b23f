"""Who computes which blocks: single flight across the fleet, decided by all workers alike from one log of claims. Pure.

Who is about to compute blocks appends a claim that lists them, in order; its number in the log is its place in the
order. Then it reads the log up to its own claim, so it knows every earlier one. A block is to be computed by the
earliest claim that lists it and has not ended. A claim ends by a later entry: its owner is done or has given up, or
somebody found its worker dead. Then the next claim in the order has its blocks, and everybody knows by the same rule.

So at any point of the log a block has one owner, and nobody waits in a circle: a claim waits only for earlier ones, and
whoever claims already holds all that it needs to go on. Computing takes blocks out of the cache's misses, never the
right to read them: a claim that is lost, late or false costs a block computed twice or a bounded wait, no more.

Times are in seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shared.messages import CLAIM_NAME, Claim


def short(names: Sequence[bytes]) -> tuple[bytes, ...]:
    """Block names as claims have them."""
    return tuple(name[:CLAIM_NAME] for name in names)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a claim may do about the blocks that it still lacks."""

    wait: int
    """So many of them, from the first on, are to be had from others; with 0 it may compute them all."""
    leader: int
    """The earlier claim whose block the first one is; 0 when there is none."""
    rides: frozenset[int]
    """Earlier claims of its own worker that have some of the blocks: within a worker, the scheduler joins."""


@dataclass(slots=True)
class _Held:
    """A claim that has not ended."""

    worker: str
    names: tuple[bytes, ...]
    seen: float
    known: bool = False
    """Its worker was alive when somebody here waited for it."""


class Flights:
    """One worker's view of the claim log.

    `keep_s`: a claim counts for so long after it was seen, as the log keeps none for longer. `grace_s`: a worker that
    nobody has heard of yet may only just have started, so its claims count for so long. `settle_s`: the blocks of a
    claim that has ended may be on their way to the cache's readers for so long.
    """

    def __init__(self, worker: str, *, keep_s: float, grace_s: float, settle_s: float) -> None:
        self._worker = worker
        self._keep_s = keep_s
        self._grace_s = grace_s
        self._settle_s = settle_s
        self._held: dict[int, _Held] = {}
        self._claims_of: dict[bytes, list[int]] = {}
        self._ended: dict[int, tuple[float, frozenset[bytes]]] = {}
        self.last = 0
        """Number of the last entry seen."""

    def observe(self, seq: int, entry: Claim | None, now: float) -> None:
        """Take in the log's next entry; None stands for one that is no claim. Entries seen before are skipped."""
        if seq <= self.last:
            return
        self.last = seq
        for old in [s for s, held in self._held.items() if now - held.seen > self._keep_s]:
            self.end(old, now)
        if entry is None:
            return
        for ended in entry.ended:
            self.end(ended, now)
        if entry.names:
            names = tuple(entry.names[i : i + CLAIM_NAME] for i in range(0, len(entry.names), CLAIM_NAME))
            self._held[seq] = _Held(entry.worker, names, now)
            for name in dict.fromkeys(names):
                self._claims_of.setdefault(name, []).append(seq)

    def end(self, seq: int, now: float) -> None:
        """This claim holds no longer; an unknown one is none."""
        if (held := self._held.pop(seq, None)) is None:
            return
        names = frozenset(held.names)
        for name in names:
            self._claims_of[name].remove(seq)
            if not self._claims_of[name]:
                del self._claims_of[name]
        self._ended = {s: e for s, e in self._ended.items() if now - e[0] <= self._settle_s}
        self._ended[seq] = (now, names)

    def holds(self, seq: int, names: Sequence[bytes] | None = None) -> bool:
        """Whether claim `seq` has not ended; with `names`, also that it is one of this worker's for just these."""
        held = self._held.get(seq)
        return held is not None and (names is None or (held.worker, held.names) == (self._worker, tuple(names)))

    def turn(self, seq: int, names: Sequence[bytes]) -> Turn:
        """What claim `seq` may do about `names`, those of its blocks that are still missing."""
        wait, leader, rides = 0, 0, set()
        for index, name in enumerate(names):
            owner = self._owner(name)
            if not 0 < owner < seq:
                break
            leader = leader or owner
            if self._held[owner].worker == self._worker:
                rides.add(owner)
            else:
                wait = index + 1
        return Turn(wait, leader, frozenset(rides))

    def _owner(self, name: bytes) -> int:
        return next(iter(self._claims_of.get(name, ())), 0)

    def lost(self, seq: int, alive: Callable[[str], bool], now: float) -> bool:
        """Whether the worker of claim `seq`, which has not ended, is dead."""
        held = self._held[seq]
        if held.worker == self._worker or alive(held.worker):
            held.known = True
            return False
        return held.known or now - held.seen > self._grace_s

    def settling(self, name: bytes, now: float) -> bool:
        """Whether a claim for this block ended only just now, so that the block may be about to appear."""
        return any(now - at <= self._settle_s and name in names for at, names in self._ended.values())

    def strays(self, mine: Collection[int]) -> list[int]:
        """Claims in this worker's name that are not `mine`: of a life before this one, or never heard back about."""
        return [s for s, held in self._held.items() if held.worker == self._worker and s not in mine]
