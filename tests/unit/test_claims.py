"""Claims on a bus in memory: what a worker waits for, when it goes ahead, and whom it tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from shared.bus.base import Stored
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.cache import claim_log
from shared.cache.claim_log import ClaimLog
from shared.cache.claims import Claims, Flight, Need
from shared.cache.prefix import PrefixCache
from shared.codec import decode, encode
from shared.flights import short
from shared.messages import Beat, Claim
from shared.peers import Peers
from shared.streams import claim_stream
from shared.subjects import Subjects
from shared.telemetry import Counters

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

SUBJECTS = Subjects("m")


def chain(path: str) -> list[bytes]:
    return [path[: i + 1].encode().ljust(32, b".") for i in range(len(path))]


class Cache:
    """Stands for `PrefixCache`: says what is there, and may say so of what cannot be had."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self.damaged: set[bytes] = set()

    def put(self, path: str) -> None:
        self.names |= set(chain(path))

    async def wait(self, names: Sequence[bytes], timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while not (length := self.present(names)) and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
        return length

    def present(self, names: Sequence[bytes]) -> int:
        return next((i for i, n in enumerate(names) if n not in self.names), len(names))


class Worker:
    def __init__(self, fleet: Fleet, name: str) -> None:
        self.name = name
        self.cache = fleet.cache
        self.counters = Counters()
        self.peers = Peers(1.0)
        self.bus = MemoryBus(fleet.broker)
        self.log = ClaimLog(
            self.bus, SUBJECTS, name, counters=self.counters, grace_s=0.3, ensure=lambda: fleet.create(self.bus)
        )
        self.claims = Claims(self.log, cast("PrefixCache", fleet.cache), self.peers, self.counters)
        self.have: dict[str, int] = {}
        self.task = asyncio.create_task(self.log.run())

    def hears(self, *workers: str) -> None:
        for worker in workers:
            self.peers.observe(Beat(role="decode", worker=worker), time.monotonic())

    async def lead(self, path: str, patience_s: float = 10.0, wanted: Callable[[], bool] = lambda: True) -> Flight:
        names = chain(path)
        self.have[path] = 0

        async def fetch(upto: int) -> None:
            for name in names[self.have[path] : upto]:
                if name not in self.cache.names - self.cache.damaged:
                    break
                self.have[path] += 1

        flight = await self.claims.lead(Need(names, lambda: self.have[path], wanted, fetch), patience_s)
        assert flight is not None
        return flight

    def going(self, path: str, patience_s: float = 10.0) -> asyncio.Task[Flight]:
        return asyncio.create_task(self.lead(path, patience_s))


class Fleet:
    """Workers A, B, C with one log and one cache; each hears the others' beats, once."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.cache = Cache()
        self.a, self.b, self.c = (Worker(self, name) for name in "ABC")
        for worker in self.workers:
            worker.hears("A", "B", "C")

    @property
    def workers(self) -> list[Worker]:
        return [self.a, self.b, self.c]

    async def __aenter__(self) -> Fleet:
        await self.create(self.a.bus)
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.task.cancel()
            await worker.bus.close()

    async def create(self, bus: MemoryBus) -> None:
        await bus.ensure_stream(claim_stream(SUBJECTS))

    async def entries(self) -> list[Claim]:
        return [decode(e.data, Claim) for e in await self.a.bus.read(SUBJECTS.claim_stream, SUBJECTS.claims)]


async def waits(task: asyncio.Task[Flight], seconds: float = 0.4) -> bool:
    return not (await asyncio.wait([task], timeout=seconds))[0]


async def test_blocks_that_come_after_the_end_was_told_are_not_computed_again() -> None:
    async with Fleet() as fleet:
        flight = await fleet.a.lead("abc")
        task = fleet.b.going("abc")
        assert await waits(task, 0.15)
        fleet.a.claims.end(flight)
        await asyncio.sleep(0.15)
        fleet.cache.put("abc")
        await task
        assert fleet.b.have["abc"] == 3
        assert (fleet.b.counters["claims_joined"], fleet.b.counters["claims_taken_over"]) == (1, 0)


async def test_a_claim_stays_while_other_work_of_its_worker_counts_on_it() -> None:
    async with Fleet() as fleet:
        first = await fleet.a.lead("abc")
        task = fleet.b.going("abx")
        assert await waits(task, 0.1)
        second = await fleet.a.lead("aby")
        fleet.a.claims.end(first)
        fleet.a.claims.end(first)
        assert await waits(task), "the second one computes it"
        fleet.a.claims.end(second)
        await asyncio.wait_for(task, 1)
        assert fleet.b.counters["claims_taken_over"] == 1


async def test_a_log_that_was_created_anew_and_has_grown_since() -> None:
    async with Fleet() as fleet:
        for path in ("x", "y"):
            await fleet.b.lead(path)
        del fleet.broker.streams[SUBJECTS.claim_stream]
        await fleet.create(fleet.a.bus)
        for path in ("abc", "p", "q", "r"):
            await fleet.c.lead(path)
        task = fleet.b.going("abc")
        assert await waits(task), "the claim before those that B has seen the numbers of"
        fleet.cache.put("abc")
        await task
        assert fleet.b.have["abc"] == 3


async def test_a_log_that_begins_anew_while_somebody_waits() -> None:
    async with Fleet() as fleet:
        await fleet.a.lead("abc")
        task = fleet.b.going("abc")
        assert await waits(task, 0.15)
        del fleet.broker.streams[SUBJECTS.claim_stream]
        await asyncio.wait_for(task, 1)
        assert fleet.b.counters["claims_failed"] == 1
        assert SUBJECTS.claim_stream in fleet.broker.streams


async def test_a_log_that_other_work_of_the_worker_finds_begun_anew() -> None:
    async with Fleet() as fleet:
        await fleet.a.lead("abc")
        task = fleet.b.going("abc", patience_s=0.3)
        await asyncio.sleep(0.01)
        del fleet.broker.streams[SUBJECTS.claim_stream]
        await fleet.create(fleet.a.bus)
        for path in ("x", "y", "z"):
            await fleet.c.lead(path)
        await fleet.b.lead("q")
        await asyncio.wait_for(task, 1)
        ended = {seq for entry in await fleet.entries() for seq in entry.ended}
        assert ended.isdisjoint({1, 2, 3}), "claims of others, whose numbers meant something else before"


async def test_blocks_that_cannot_be_had_are_waited_for_with_patience_and_without_haste() -> None:
    async with Fleet() as fleet:
        await fleet.a.lead("abc")
        fleet.cache.put("abc")
        fleet.cache.damaged = set(chain("abc")[1:])
        began = time.monotonic()
        await fleet.b.lead("abc", patience_s=0.5)
        assert 0.5 < time.monotonic() - began < 2.0
        assert fleet.b.have["abc"] == 1
        assert any(1 in entry.ended for entry in await fleet.entries()), "and the others hear of it"


async def test_who_is_taken_for_dead_while_it_waits_gets_in_line_again() -> None:
    async with Fleet() as fleet:
        flight = await fleet.a.lead("abc")
        second = fleet.b.going("abc")
        assert await waits(second, 0.1)
        third = fleet.c.going("abc")
        assert await waits(third, 0.1)
        await fleet.a.bus.append(SUBJECTS.claims, encode(Claim(worker="A", ended=[2])))
        assert await waits(second, 0.3)
        fleet.a.claims.end(flight)
        await asyncio.wait_for(third, 1)
        assert await waits(second), "the third one computes it now"
        fleet.c.claims.end(third.result())
        await asyncio.wait_for(second, 1)


@pytest.mark.parametrize("known", [True, False])
async def test_the_dead_are_not_waited_for(known: bool) -> None:
    """Those that were heard of before, and those that never were."""
    async with Fleet() as fleet:
        await fleet.a.lead("abc")
        fleet.b.peers = fleet.b.claims._peers = Peers(0.3)
        if known:
            fleet.b.hears("A")
        began = time.monotonic()
        await fleet.b.lead("abc")
        assert 0.2 < time.monotonic() - began < 1.5
        assert fleet.b.counters["claims_taken_over"] == 1


async def test_nobody_waits_for_ever_whatever_the_log_says() -> None:
    """Its own worker's claim comes first, which is never overruled, and nothing comes of it."""
    async with Fleet() as fleet:
        await fleet.a.lead("ab")
        other = fleet.b.going("abc")
        assert await waits(other, 0.1)
        began = time.monotonic()
        await fleet.a.lead("abcd", patience_s=0.15)
        assert 0.4 < time.monotonic() - began < 1.5
        assert fleet.a.counters["claims_given_up"] == 1
        other.cancel()


async def test_who_is_not_wanted_any_more_stops_waiting_and_leaves_no_claim() -> None:
    async with Fleet() as fleet:
        await fleet.a.lead("abc")
        wanted = [True]
        task = asyncio.create_task(fleet.b.lead("abc", wanted=lambda: wanted[0]))
        assert await waits(task, 0.1)
        wanted[0] = False
        fleet.b.claims.end(await asyncio.wait_for(task, 1))
        await asyncio.sleep(0.02)
        assert [entry.ended for entry in await fleet.entries()] == [[], [], [2]]
        cancelled = fleet.b.going("abc")
        assert await waits(cancelled, 0.1)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await asyncio.sleep(0.02)
        assert (await fleet.entries())[-1].ended == [4]


async def test_ends_are_told_when_the_bus_is_back() -> None:
    async with Fleet() as fleet:
        flight = await fleet.a.lead("abc")
        fleet.a.bus.disconnect()
        fleet.a.claims.end(flight)
        await asyncio.sleep(0.05)
        fleet.a.bus.reconnect()
        await asyncio.wait_for(fleet.b.lead("abc"), 2)


async def test_the_ends_of_all_claims_are_told_at_the_end() -> None:
    """Of those whose work was handed back too: nobody is to wait until this worker's beats are missed."""
    async with Fleet() as fleet:
        flight = await fleet.a.lead("abc")
        await fleet.a.lead("xyz")
        task = fleet.b.going("xyz")
        late = asyncio.create_task(fleet.a.log.claim(chain("pq")))
        await asyncio.sleep(0)
        await fleet.a.log.close()
        await asyncio.wait_for(task, 0.6)
        assert await late is not None
        fleet.a.claims.end(flight)
        await asyncio.sleep(0.02)
        entries = await fleet.entries()
        assert [seq for entry in entries if entry.worker == "A" for seq in entry.ended] == [1, 2, 4]


async def test_who_waits_when_the_log_is_closed_makes_no_claim_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds that its claim has ended, as if others had taken its worker for dead."""
    async with Fleet() as fleet:
        await fleet.a.lead("abc")
        task = fleet.b.going("abc")
        assert await waits(task, 0.15)
        await fleet.b.log.close()
        fleet.b.claims.end(await asyncio.wait_for(task, 1))
        assert await fleet.b.log.claim(chain("x")) is None
        assert [(entry.worker, entry.ended) for entry in await fleet.entries()] == [("A", []), ("B", []), ("B", [2])]


async def test_each_end_is_told_once_when_two_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The side task is just telling one when the log is closed."""
    real = MemoryBus.append

    async def slow(bus: MemoryBus, *args: Any, **options: Any) -> int:
        await asyncio.sleep(0.05)
        return await real(bus, *args, **options)

    async with Fleet() as fleet:
        first, second = await fleet.a.lead("abc"), await fleet.a.lead("xyz")
        monkeypatch.setattr(MemoryBus, "append", slow)
        fleet.a.claims.end(first)
        await asyncio.sleep(0.02)
        fleet.a.claims.end(second)
        await fleet.a.log.close()
        await asyncio.sleep(0.1)
        assert [entry.ended for entry in await fleet.entries()] == [[], [], [1], [2]]


@pytest.mark.parametrize("trouble", ["slow", "gone"])
async def test_closing_does_not_wait_for_a_log_that_cannot_be_used(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Fleet() as fleet:
        await fleet.a.lead("abc")
        if trouble == "slow":
            monkeypatch.setattr(MemoryBus, "append", lambda *_, **__: asyncio.sleep(30))
        else:
            fleet.a.bus.disconnect()
        began = time.monotonic()
        await fleet.a.log.close()
        assert time.monotonic() - began < 2 * claim_log.DEADLINE_S + 0.5


@pytest.mark.parametrize("heard", [True, False])
async def test_a_claim_that_is_cancelled_while_it_is_made_ends(heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its number is known, and before: then it is found in the log."""
    async with Fleet() as fleet:
        slow, gate = ("read" if heard else "append"), asyncio.Event()
        real = getattr(MemoryBus, slow)

        async def held_up(bus: MemoryBus, *args: Any, **options: Any) -> Any:
            answer = await real(bus, *args, **options)
            await gate.wait()
            return answer

        monkeypatch.setattr(MemoryBus, slow, held_up)
        making = asyncio.create_task(fleet.a.log.claim(chain("abc")))
        await asyncio.sleep(0.05)
        monkeypatch.setattr(MemoryBus, slow, real)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        if not heard:
            assert await fleet.a.log.look()
        await asyncio.sleep(0.05)
        assert [entry.ended for entry in await fleet.entries()] == [[], [1]]


async def fill(fleet: Fleet, claims: int, ended: bool = True) -> None:
    for number in range(claims):
        names = b"".join(short(chain(f"{number:x}")))
        seq = await fleet.c.bus.append(SUBJECTS.claims, encode(Claim(worker="X", names=names)))
        if ended:
            await fleet.c.bus.append(SUBJECTS.claims, encode(Claim(worker="X", ended=[seq])))


def delayed(monkeypatch: pytest.MonkeyPatch, page_s: float) -> None:
    """Each page takes so long."""
    real = MemoryBus.read

    async def read(bus: MemoryBus, *args: Any, **options: Any) -> list[Stored]:
        await asyncio.sleep(page_s)
        return await real(bus, *args, **options)

    monkeypatch.setattr(MemoryBus, "read", read)


async def test_a_log_too_long_to_be_caught_up_with_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read stays read: the next claim goes on from there."""
    async with Fleet() as fleet:
        await fill(fleet, 8 * claim_log.PAGE // 2)
        fleet.b.task.cancel()
        delayed(monkeypatch, claim_log.DEADLINE_S / 6)
        began = time.monotonic()
        assert await fleet.b.log.claim(chain("abc")) is None
        assert time.monotonic() - began < 2 * claim_log.DEADLINE_S
        assert fleet.b.log.flights.last > claim_log.PAGE
        assert await fleet.b.log.claim(chain("abc")) is not None
        assert fleet.b.counters["claims_failed"] == 1


async def test_a_worker_that_starts_reads_the_log_before_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Fleet() as fleet:
        await fill(fleet, 8 * claim_log.PAGE // 2)
        delayed(monkeypatch, claim_log.DEADLINE_S / 6)
        fresh = Worker(fleet, "D")
        try:
            async with asyncio.timeout(5):
                while fresh.log.flights.last < 8 * claim_log.PAGE:
                    await asyncio.sleep(0.01)
            assert await fresh.log.claim(chain("abc")) is not None
            assert fresh.counters["claims_failed"] == 0
        finally:
            fresh.task.cancel()


async def test_a_worker_that_is_not_asked_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_log, "LOOK_S", 0.05)
    async with Fleet() as fleet:
        await asyncio.sleep(0.02)
        await fill(fleet, 3, ended=False)
        await asyncio.sleep(0.3)
        assert fleet.b.log.flights.last == 3
        stray = await fleet.c.bus.append(SUBJECTS.claims, encode(Claim(worker="B", names=chain("q")[0][:16])))
        await asyncio.sleep(0.3)
        assert (await fleet.entries())[-1] == Claim(worker="B", ended=[stray])
        del fleet.broker.streams[SUBJECTS.claim_stream]
        await asyncio.sleep(0.3)
        assert SUBJECTS.claim_stream in fleet.broker.streams
        assert fleet.b.counters["claims_failed"] == 0


async def test_others_have_their_turn_while_the_log_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two entries, and within one that ends many."""
    monkeypatch.setattr(claim_log, "SLICE_S", 0.0)
    async with Fleet() as fleet:
        fleet.b.task.cancel()
        await fill(fleet, 100, ended=False)
        await fleet.c.bus.append(SUBJECTS.claims, encode(Claim(worker="X", ended=list(range(1, 101)))))
        flights, seen = fleet.b.log.flights, set()
        reading = asyncio.create_task(fleet.b.log.look())
        while not reading.done():
            seen.add((flights.last, sum(flights.holds(seq) for seq in range(1, 101))))
            await asyncio.sleep(0)
        assert seen >= {(n, n) for n in range(1, 101)} | {(100, n) for n in range(1, 101)} | {(101, 0)}


async def test_who_looks_while_another_does_asks_once_more_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, real = 0, MemoryBus.read

    async def counted(bus: MemoryBus, *args: Any, **options: Any) -> list[Stored]:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0.01)
        return await real(bus, *args, **options)

    async with Fleet() as fleet:
        await asyncio.sleep(0.02)
        monkeypatch.setattr(MemoryBus, "read", counted)
        assert all(await asyncio.gather(*(fleet.b.log.look() for _ in range(50))))
        assert reads <= 2


async def test_what_is_left_to_tell_is_told_at_the_end() -> None:
    async with Fleet() as fleet:
        flight = await fleet.a.lead("abc")
        fleet.a.task.cancel()
        fleet.a.claims.end(flight)
        await fleet.a.log.close()
        assert (await fleet.entries())[-1].ended == [1]


async def test_who_is_at_work_is_waited_for_beyond_the_patience() -> None:
    """What A says that it has computed grows, until it is stuck."""
    async with Fleet() as fleet:
        await fleet.a.lead("abc")
        waiting = fleet.b.going("abc", patience_s=0.3)
        for done in range(1, 10):
            beat = Beat(role="prefill", worker="A", counters={"prefill_tokens": 256 * done})
            fleet.b.peers.observe(beat, time.monotonic())
            assert await waits(waiting, 0.1), done
        began = time.monotonic()
        await asyncio.wait_for(waiting, 1)
        assert time.monotonic() - began > 0.1
        assert fleet.b.counters["claims_taken_over"] == 1
