"""One worker at the claim log: what it reads there, and what it says about claims of its own and of others.

The log is a small stream in memory. Whatever is wrong with it (gone, slow, full of garbage) is counted, never raised.

It is read page by page, and what has been read stays read: a log that is too long to be caught up with in the time that
a claim has is too long once, not for ever. A side task keeps up with it, so that a claim finds little that is new.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import structlog

from shared.bus.base import Bus, Stored
from shared.codec import decode, encode
from shared.errors import RequestError, StreamMissing, TrineError
from shared.flights import Flights, short
from shared.messages import MAX_CLAIMED, MAX_ENDED, Claim
from shared.streams import CLAIM_AGE_S
from shared.subjects import Subjects
from shared.telemetry import Counters, rarely

DEADLINE_S = 0.5
"""For what is said to the log or asked of it while somebody waits to compute; then it goes without."""
SETTLE_S = 0.2
"""How long after a claim's end its last blocks may take to be known here."""
RETRY_S = 0.5
LOOK_S = 2.0
"""How often the side task looks into the log."""
CATCH_UP_S = 5.0
"""How long it reads in one go."""
PAGE = 128
"""Entries that are asked for at once."""
POLL_S = 0.005
SLICE_S = 0.002
"""For so long entries are taken in before other tasks have their turn; one of many blocks may take longer."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class HeldClaim:
    """Claim `seq`, made here, in the log that `flights` is the view of."""

    flights: Flights
    seq: int


@dataclass(slots=True)
class _Slices:
    """Long work on the event loop in short slices."""

    began: float = field(default_factory=time.monotonic)

    async def pause(self) -> None:
        if time.monotonic() - self.began > SLICE_S:
            await anyio.lowlevel.checkpoint()
            self.began = time.monotonic()


class ClaimLog:
    """`grace_s`: see `Flights`. `ensure` creates the streams that are missing."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        worker: str,
        *,
        counters: Counters,
        grace_s: float,
        ensure: Callable[[], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._worker = worker
        self._counters = counters
        self._grace_s = grace_s
        self._ensure = ensure
        self._appending = 0
        self._closed = False
        self._reading, self._telling = anyio.Lock(), anyio.Lock()
        self._told = anyio.Event()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """A stream that was created again is another log: the numbers known so far mean nothing in it."""
        self.flights = Flights(self._worker, keep_s=CLAIM_AGE_S, grace_s=self._grace_s, settle_s=SETTLE_S)
        self._holders: dict[int, int] = {}  # claims made here that have not ended, and how many need each
        self._ended: list[int] = []  # claims whose end is still to be told
        self._complete = 0.0  # when the last look began that found the log's end
        self._newest = b""  # the last entry that was read: in another log, another one has its number

    async def claim(self, names: Sequence[bytes]) -> HeldClaim | None:
        """A new claim for these blocks, with every earlier claim known. None if that could not be had in time."""
        if self._closed:
            return None
        names, held = short(names[:MAX_CLAIMED]), None
        try:
            with anyio.fail_after(DEADLINE_S):
                held = await self._append(names)
                while held.flights.last < held.seq:
                    await self._read()
                    if held.flights is not self.flights:
                        held = await self._append(names)
        except BaseException as error:
            if held is not None:
                self.end(held)
            if not isinstance(error, TrineError | TimeoutError):
                raise
            await self._failed(error)
            return None
        self._counters["claims"] += 1
        return held

    async def _append(self, names: tuple[bytes, ...]) -> HeldClaim:
        self._appending += 1
        try:
            entry = Claim(worker=self._worker, names=b"".join(names))
            seq = await self._bus.append(self._subjects.claims, encode(entry), timeout=DEADLINE_S)
        finally:
            self._appending -= 1
        if seq <= self.flights.last and not self.flights.holds(seq, names):
            self._begin_anew()
        self._holders[seq] = 1
        return HeldClaim(self.flights, seq)

    def ride(self, seq: int) -> HeldClaim | None:
        """Keep a claim that was made here from ending before this one of its holders does."""
        if seq not in self._holders:
            return None
        self._holders[seq] += 1
        return HeldClaim(self.flights, seq)

    def end(self, held: HeldClaim) -> None:
        """One holder fewer; the claim ends with its last."""
        if held.flights is not self.flights or held.seq not in self._holders:
            return
        self._holders[held.seq] -= 1
        if not self._holders[held.seq]:
            del self._holders[held.seq]
            self._end(held.seq)

    async def look(self) -> bool:
        """Take in what is new. False: no answer in time, or this is not the log any more."""
        before = self.flights
        try:
            with anyio.fail_after(DEADLINE_S):
                while await self._read():
                    pass
        except (TrineError, TimeoutError) as error:
            await self._failed(error)
            return False
        return self.flights is before

    async def _read(self) -> bool:
        """Take in the next page. True: there may be more."""
        asked = time.monotonic()
        async with self._reading:
            if self._complete >= asked:  # others have read all that was there, while this one waited for its turn
                return False
            flights, began = self.flights, time.monotonic()
            stream, subject = self._subjects.claim_stream, self._subjects.claims
            last, newest = flights.last, self._newest
            entries = await self._bus.read(stream, subject, max(last - 1, 0), DEADLINE_S, PAGE)
            if flights is self.flights and any(e.seq == last and e.data != newest for e in entries[:1]):
                self._begin_anew()
            slices = _Slices()
            for entry in entries:
                await self._take_in(flights, entry, slices)
            if flights is not self.flights or len(entries) == PAGE:
                return True
            self._complete = began
            if not self._appending:
                await self._end_strays(flights, slices)
            return False

    async def _take_in(self, flights: Flights, entry: Stored, slices: _Slices) -> None:
        if flights is not self.flights or entry.seq <= flights.last:
            return
        claim = self._parse(entry.data)
        for seq in claim.ended if claim else ():  # one by one, as they may be many
            flights.end(seq, time.monotonic())
            await slices.pause()
        flights.observe(entry.seq, claim, time.monotonic())
        if flights is self.flights:
            self._newest = entry.data
        await slices.pause()

    async def _end_strays(self, flights: Flights, slices: _Slices) -> None:
        for seq in flights.strays(self._holders):
            if flights is self.flights:
                self._end(seq)
                await slices.pause()

    def _parse(self, data: bytes) -> Claim | None:
        try:
            return decode(data, Claim)
        except RequestError as error:
            self._counters["claims_bad"] += 1
            if rarely(self._counters["claims_bad"]):
                log.warning("bad entry in the claim log", error=str(error), so_far=self._counters["claims_bad"])
            return None

    async def _failed(self, error: Exception) -> None:
        self._counters["claims_failed"] += 1
        await self._unusable(error)

    async def _unusable(self, error: Exception) -> None:
        log.debug("the claim log cannot be used", error=str(error), kind=type(error).__name__)
        if isinstance(error, StreamMissing):
            self._begin_anew()
            with anyio.move_on_after(DEADLINE_S):
                await self._ensure()

    # Ends

    def overrule(self, seq: int) -> None:
        """Say for its worker, which does not, that a claim has ended."""
        self._end(seq)

    def _end(self, seq: int) -> None:
        self.flights.end(seq, time.monotonic())
        self._ended.append(seq)
        self._told.set()

    async def run(self) -> None:
        """Side task: keep up with the log, and tell the others which claims have ended."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._keep_up)
            while True:
                await self._told.wait()
                self._told = anyio.Event()
                while self._ended:
                    if not await self._tell():
                        await anyio.sleep(RETRY_S)

    async def _keep_up(self) -> None:
        while True:
            try:
                with anyio.move_on_after(CATCH_UP_S):
                    while await self._read():
                        pass
            except TrineError as error:
                await self._unusable(error)
            while self.flights.expire(time.monotonic()):
                await anyio.lowlevel.checkpoint()
            await anyio.sleep(LOOK_S)

    async def _tell(self) -> bool:
        async with self._telling:
            queue = self._ended
            ended = queue[:MAX_ENDED]
            if not ended:  # told by another, meanwhile
                return True
            try:
                entry = Claim(worker=self._worker, ended=ended)
                await self._bus.append(self._subjects.claims, encode(entry), timeout=DEADLINE_S)
            except TrineError as error:
                await self._failed(error)
                return False
            del queue[: len(ended)]
            return True

    async def close(self) -> None:
        """End the claims made here, whoever still has them, and tell it, if that can be done soon; make no new ones."""
        self._closed = True
        with anyio.move_on_after(DEADLINE_S):
            while self._appending:
                await anyio.sleep(POLL_S)
        for seq in list(self._holders):
            self._end(seq)
        self._holders.clear()
        with anyio.move_on_after(DEADLINE_S):
            while self._ended and await self._tell():
                pass
