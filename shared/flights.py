"""Who computes which blocks: single flight across the fleet, decided by all workers alike from one log of claims. Pure.

Who is about to compute blocks appends a claim that lists them, in order; its number in the log is its place in the
order. Then it reads the log up to its own claim, so it knows every earlier one. A block is to be computed by the
earliest claim that lists it and has not ended. A claim ends by a later entry: its owner is done or has given up, or
somebody found its worker dead. Then the next claim in the order has its blocks, and everybody knows by the same rule.

So at any point of the log a block has one owner, and nobody waits in a circle: a claim waits only for earlier ones, and
who need not wait for another claim either has all that it takes to go on or ends its own. Computing takes blocks out of
the cache's misses, never the right to read them: a claim that is lost, late or false costs a block computed twice or a
bounded wait, no more.

Times are in seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shared.messages import CLAIM_NAME, Claim

MAX_NAMES = 65_536
"""Names of blocks, in claims that hold and in those just ended, that are kept of a log: about 45 MB at most."""
EXPIRE = 8
"""Claims that are dropped at once for their age: more than an entry can add, and little work."""
EXPIRE_SETTLED = 4096


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

    Whatever the log says, no more than `MAX_NAMES` are kept: beyond that the oldest claims count no longer. What one
    call does is bounded too, by what one claim may list: the log may be long, and nobody is to wait while it is read.
    """

    def __init__(self, worker: str, *, keep_s: float, grace_s: float, settle_s: float) -> None:
        self._worker = worker
        self._keep_s = keep_s
        self._grace_s = grace_s
        self._settle_s = settle_s
        self._held: OrderedDict[int, _Held] = OrderedDict()  # in the order of the log, and so of time
        self._names = 0  # in all of these
        self._mine: dict[int, None] = {}  # those of this worker
        self._claims_of: dict[bytes, list[int]] = {}  # in the order of the log
        self._settling: OrderedDict[bytes, float] = OrderedDict()  # when a block's last claim ended, in order of time
        self.last = 0
        """Number of the last entry seen."""

    def observe(self, seq: int, entry: Claim | None, now: float) -> None:
        """Take in the log's next entry; None stands for one that is no claim. Entries seen before are skipped."""
        if seq <= self.last:
            return
        self.last = seq
        self.expire(now)
        if entry is None:
            return
        for ended in entry.ended:
            self.end(ended, now)
        if entry.names:
            self._hold(seq, entry, now)

    def _hold(self, seq: int, entry: Claim, now: float) -> None:
        names = tuple(entry.names[i : i + CLAIM_NAME] for i in range(0, len(entry.names), CLAIM_NAME))
        self._held[seq] = _Held(entry.worker, names, now)
        self._names += len(names)
        if entry.worker == self._worker:
            self._mine[seq] = None
        for name in dict.fromkeys(names):
            self._claims_of.setdefault(name, []).append(seq)
        while self._names > MAX_NAMES:
            self.end(next(iter(self._held)), now)

    def end(self, seq: int, now: float) -> None:
        """This claim holds no longer; an unknown one is none."""
        if (held := self._held.pop(seq, None)) is None:
            return
        self._names -= len(held.names)
        self._mine.pop(seq, None)
        for name in dict.fromkeys(held.names):
            claims = self._claims_of[name]
            del claims[bisect_left(claims, seq)]
            if not claims:
                del self._claims_of[name]
            self._settling[name] = now
            self._settling.move_to_end(name)
        while len(self._settling) > MAX_NAMES:
            self._settling.popitem(last=False)

    def expire(self, now: float) -> bool:
        """Drop what counts no longer for its age, a few claims at most; True if that many were dropped."""
        old: list[int] = []
        for seq, held in self._held.items():
            if len(old) == EXPIRE or now - held.seen <= self._keep_s:
                break
            old.append(seq)
        for seq in old:
            self.end(seq, now)
        for _ in range(EXPIRE_SETTLED):
            if not self._settling or self.settling(next(iter(self._settling)), now):
                break
            self._settling.popitem(last=False)
        return len(old) == EXPIRE

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

    def worker_of(self, name: bytes) -> str:
        """Who is to compute this block, by the claims that hold; "" for nobody."""
        owner = self._owner(name)
        return self._held[owner].worker if owner else ""

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
        ended = self._settling.get(name)
        return ended is not None and now - ended <= self._settle_s

    def strays(self, mine: Collection[int]) -> list[int]:
        """Claims in this worker's name that are not `mine`: of a life before this one, or never heard back about."""
        return [seq for seq in self._mine if seq not in mine]
