"""How a simulated decode worker gets a prompt's blocks: as services/decode/loading.py does, on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from benchmarks.simulate_cache import Cache, Hits
from benchmarks.simulate_clock import Clock
from benchmarks.simulate_prefill import Job
from benchmarks.simulate_world import BLOCK, Shape
from services.decode.scheduler import DecodeScheduler
from services.decode.sequence import Sequence
from shared.lifecycle import Phase

CLAIM_MIN_BLOCKS = 4


class Queue(Protocol):
    """Of prefill jobs: one that is there already is not put in again."""

    def put(self, job: Job) -> None: ...


class Loader:
    """`ready` is told when a sequence has what it gets."""

    def __init__(
        self,
        number: int,
        machine: int,
        shape: Shape,
        clock: Clock,
        cache: Cache,
        scheduler: DecodeScheduler,
        jobs: Queue | None,
        hits: Hits,
        ready: Callable[[], None],
    ) -> None:
        self._number, self._machine, self._shape, self._clock = number, machine, shape, clock
        self._cache, self._scheduler, self._jobs = cache, scheduler, jobs
        self._hits, self._ready = hits, ready

    def load(self, sequence: Sequence) -> None:
        self._hits.pool += sequence.computed // BLOCK
        epoch = sequence.epoch
        self._fetch(sequence, epoch, lambda: self._missing(sequence, epoch))

    def _wanted(self, sequence: Sequence) -> int:
        return (len(sequence.tokens) - 1) // BLOCK

    def _loading(self, sequence: Sequence, epoch: int) -> bool:
        return sequence.epoch == epoch and sequence.phase is Phase.LOADING

    def _fetch(self, sequence: Sequence, epoch: int, then: Callable[[], None], prefilled: bool = False) -> None:
        """What is somewhere, from the first missing block on."""
        have = sequence.computed // BLOCK
        names = sequence.names[have : self._wanted(sequence)]
        there = self._cache.longest(self._machine, names)
        placed = 0
        while placed < there and self._scheduler.place(sequence, have + placed) is not None:
            placed += 1
        if not placed:
            then()
            return

        def arrived(near: int, far: int) -> None:
            if self._loading(sequence, epoch):
                for index in range(have, have + placed):
                    self._scheduler.filled(sequence, index)
                if prefilled:
                    self._hits.prefill += placed
                else:
                    self._hits.machine += near
                    self._hits.nats += far
            then()

        self._cache.fetch(self._machine, names[:placed], arrived)

    def _missing(self, sequence: Sequence, epoch: int) -> None:
        """A job for what is not there, if it is much; else it is computed here, unless somebody else is at it."""
        if not self._loading(sequence, epoch):
            return
        wanted = self._wanted(sequence)
        missing = wanted - sequence.computed // BLOCK
        if self._jobs is not None and missing * BLOCK > self._shape.local_prefill_tokens:
            self._jobs.put(Job(sequence.names[wanted - 1], tuple(sequence.tokens[: wanted * BLOCK])))
            self._follow(sequence, epoch)
        elif (
            missing >= CLAIM_MIN_BLOCKS and self._cache.flights.get(self._next(sequence), self._number) != self._number
        ):
            self._follow(sequence, epoch)
        else:
            if missing >= CLAIM_MIN_BLOCKS:
                for name in sequence.names[sequence.computed // BLOCK : wanted]:
                    self._cache.flights.setdefault(name, self._number)
            self._loaded(sequence)

    def _next(self, sequence: Sequence) -> bytes:
        return sequence.names[sequence.computed // BLOCK]

    def _follow(self, sequence: Sequence, epoch: int) -> None:
        """Each block as it appears; without progress the rest is computed here."""
        if not self._loading(sequence, epoch):
            return
        if sequence.computed // BLOCK >= self._wanted(sequence):
            self._loaded(sequence)
            return
        before, told = sequence.computed, False

        def again() -> None:
            nonlocal told
            if told:
                return
            told = True
            self._fetch(sequence, epoch, lambda: self._follow(sequence, epoch), prefilled=True)

        def give_up() -> None:
            nonlocal told
            if self._loading(sequence, epoch) and sequence.computed == before and not told:
                told = True
                self._loaded(sequence)

        if self._cache.longest(self._machine, [self._next(sequence)]):
            again()
            return
        self._cache.wait(self._next(sequence), again)
        self._clock.after(self._shape.patience_s, give_up)

    def _loaded(self, sequence: Sequence) -> None:
        self._scheduler.loaded(sequence)
        self._clock.after(0.0, self._ready)  # not at once: this may be called while a step is being planned
