"""Single flight across the fleet: who is about to compute blocks claims them, and waits for those others compute.

The rules are in `shared.flights`. A claim that cannot be made, or wait that brings nothing, ends in computing: a block
may be computed twice, never not at all.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio

from shared.cache.claim_log import ClaimLog, HeldClaim
from shared.cache.prefix import PrefixCache
from shared.flights import Turn, short
from shared.patience import Patience
from shared.peers import Peers
from shared.telemetry import Counters

ROUND_S = 0.1
"""How often who waits for others looks into the log: whether they still compute what it waits for."""


@dataclass(frozen=True, slots=True)
class Need:
    """Blocks that somebody is to have: `names` of all, in order, the first `have()` of them being there already.

    `fetch(n)` brings them from the cache up to number `n`, as far as it has them. Waiting ends when `wanted()` does;
    `joins()` is called when it begins.
    """

    names: Sequence[bytes]
    have: Callable[[], int]
    wanted: Callable[[], bool]
    fetch: Callable[[int], Awaitable[object]]
    joins: Callable[[], None] = lambda: None


@dataclass(slots=True, eq=False)
class Flight:
    """What is being computed here, for everybody. End it (`Claims.end`) when it is stored, or will not be computed."""

    claim: HeldClaim
    rides: list[HeldClaim] = field(default_factory=list)
    """Claims of other work of this worker that has the same blocks: these do not end before this flight does."""
    over: bool = False


class Claims:
    """One worker's flights."""

    def __init__(self, log: ClaimLog, cache: PrefixCache, peers: Peers, counters: Counters) -> None:
        self._log = log
        self._cache = cache
        self._peers = peers
        self._counters = counters

    async def lead(self, need: Need, patience_s: float, since: float | None = None) -> Flight | None:
        """Claim what is missing and bring what others compute; what is missing then, is the caller's to compute.

        Others are not waited for when they are dead, or when for `patience_s` seconds none of their blocks has come and
        they were not seen at work (see `Patience`), counted from `since` for who has waited for them already. None:
        without a claim, and without having waited.
        """
        claim = await self._log.claim(need.names[need.have() :])
        if claim is None:
            return None
        flight = Flight(claim)
        now = time.monotonic()
        try:
            began = now if since is None else since
            await self._join(flight, need, Patience(patience_s, began, began))
        except BaseException:
            self.end(flight)
            raise
        return flight

    def at_work(self, name: bytes, now: float) -> tuple[str, dict[str, int]]:
        """Which worker has claimed this block, "" if none is known to, and how many prompt tokens each of the others
        has computed, by its last beat."""
        return self._log.flights.worker_of(short([name])[0]), self._peers.counted("prefill_tokens", now)

    def end(self, flight: Flight) -> None:
        """Its blocks are stored, or will not be computed here. May be called twice."""
        if flight.over:
            return
        flight.over = True
        for held in (flight.claim, *flight.rides):
            self._log.end(held)

    async def _join(self, flight: Flight, need: Need, patience: Patience) -> None:
        looked, covered = time.monotonic(), 0
        while need.wanted() and (have := need.have()) < len(need.names):
            now = time.monotonic()
            if now - looked > ROUND_S:
                if not await self._look(flight, need.names[have:]):
                    return
                looked = now
            flights, rest = flight.claim.flights, short(need.names[have:])
            if flights is not self._log.flights:
                return  # that log is gone: there is no telling who computes what it said
            turn = flights.turn(flight.claim.seq, rest)
            patience.follow(turn.leader, now)
            patience.hear(*self.at_work(need.names[have], now), now)
            if turn.wait and not covered:
                self._counters["claims_joined"] += 1
                need.joins()
            covered = max(covered, have + turn.wait)
            if not turn.wait and not flights.settling(rest[0], now):
                self._counters["claims_taken_over"] += int(have < covered)
                flight.rides += [held for seq in turn.rides if (held := self._log.ride(seq))]
                return
            if turn.wait and self._hopeless(flight, turn, patience, now):
                self._log.overrule(turn.leader)
            elif patience.quite_over(now):
                self._counters["claims_given_up"] += 1
                return
            elif await self._bring(need, have):
                patience.progress = time.monotonic()

    async def _look(self, flight: Flight, names: Sequence[bytes]) -> bool:
        """Into the log. False: compute now, there is no telling who else does."""
        if not await self._log.look():
            return False
        if not flight.claim.flights.holds(flight.claim.seq):  # others took this worker for dead
            again = await self._log.claim(names)
            if again is None:
                return False
            self._log.end(flight.claim)
            flight.claim = again
        return True

    def _hopeless(self, flight: Flight, turn: Turn, patience: Patience, now: float) -> bool:
        if turn.leader in turn.rides:
            return False
        return patience.over(now) or flight.claim.flights.lost(
            turn.leader, lambda worker: self._peers.present(worker, now), now
        )

    async def _bring(self, need: Need, have: int) -> bool:
        """The blocks from number `have` on that the cache has, or will have soon. False if none came."""
        present = await self._cache.wait(need.names[have:], ROUND_S)
        if not present or not need.wanted():
            return False
        await need.fetch(have + present)
        if need.have() > have:
            return True
        await anyio.sleep(ROUND_S)  # it says that it has them, and does not give them
        return False
