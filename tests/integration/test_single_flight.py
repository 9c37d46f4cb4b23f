"""A prefix that is being computed anywhere is computed once; whoever waits for it takes over when its leader dies."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from services.decode.service import DecodeWorker
from services.prefill.service import PrefillWorker
from shared.actor import Actor
from shared.bus.embedded import EmbeddedNats
from shared.bus.memory import MemoryBus
from shared.bus.nats import NatsBus
from shared.cache.claim_log import ClaimLog
from shared.cache.naming import Lineage
from shared.codec import decode, encode
from shared.errors import BusDisconnected, StreamFull, StreamMissing
from shared.flights import short
from shared.messages import CLAIM_NAME, Claim
from shared.subjects import Subjects
from shared.tenants import DEFAULT_TENANT
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL, FleetRig
from tests.nats_rig import NatsRig
from trine.completion import Completion

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SUBJECTS = Subjects(MODEL)
PREFIX, TAIL = 12, 4  # blocks


def prompt(number: int = 0, prefix: int = PREFIX, tail: int = TAIL) -> list[int]:
    """A common prefix, a tail of its own, and two tokens more, which fill no block."""
    common, own = random.Random(1000), random.Random(number)
    return [common.randrange(1000) for _ in range(4 * prefix)] + [own.randrange(1000) for _ in range(4 * tail + 2)]


def slow(step_s: float = 0.02) -> FakeEngine:
    return FakeEngine(blocks=128, step_s=step_s)


async def decoders(rig: FleetRig, count: int, step_s: float = 0.02, **overrides: Any) -> None:
    """Each takes one request at a time and computes four blocks a step."""
    options = {"max_running": 1, "step_tokens": 16, **overrides}
    await asyncio.gather(*(rig.decode(f"decode-{n}", slow(step_s), **options) for n in range(count)))


async def prefillers(rig: FleetRig, count: int, step_s: float = 0.02, **overrides: Any) -> None:
    await asyncio.gather(*(rig.prefill(f"prefill-{n}", slow(step_s), **overrides) for n in range(count)))


def total(workers: Sequence[Actor], counter: str = "computed_blocks") -> int:
    return sum(worker.counters[counter] for worker in workers)


def right(answers: Sequence[Completion]) -> bool:
    return [list(a.token_ids) for a in answers] == [completion(prompt(n), 3) for n in range(len(answers))]


async def ask(rig: FleetRig, count: int) -> list[Completion]:
    client = rig.client()
    async with asyncio.timeout(20):
        return list(
            await asyncio.gather(
                *(client.generate(token_ids=prompt(n), max_tokens=3, id=f"r{n}") for n in range(count))
            )
        )


async def leader_of(rig: FleetRig, blocks: int = 4) -> str:
    """The worker that computes, once it has computed so many blocks."""
    async with asyncio.timeout(5):
        while True:
            for name, worker in rig.workers.items():
                if worker.counters["computed_blocks"] >= blocks:
                    return name
            await asyncio.sleep(0.002)


async def waits_for_others(workers: Sequence[Actor]) -> None:
    async with asyncio.timeout(5):
        while total(workers, "claims_joined") < 1:
            await asyncio.sleep(0.002)


def ended(rig: FleetRig) -> int:
    return total(list(rig.workers.values()), "claims_taken_over")


async def no_claim_is_left(rig: FleetRig) -> None:
    logs: list[ClaimLog] = [w._claim_log for w in rig.workers.values() if isinstance(w, DecodeWorker | PrefillWorker)]
    async with asyncio.timeout(5):
        while any(log._holders or log._ended for log in logs):
            await asyncio.sleep(0.01)


class TestOnce:
    @pytest.mark.parametrize("count", [2, 4, 8])
    @pytest.mark.parametrize("prefill", [0, 2])
    async def test_a_cold_prefix_wanted_by_many(self, count: int, prefill: int) -> None:
        async with FleetRig() as rig:
            await prefillers(rig, prefill, max_jobs=count // 2)
            await decoders(rig, count)
            answers = await ask(rig, count)
            workers = list(rig.workers.values())
            assert right(answers)
            assert total(workers) == PREFIX + count * TAIL
            assert total(workers, "claims_joined") > 0
            assert total(workers, "claims_taken_over") == 0
            if prefill:
                assert sum(w.counters["jobs_done"] > 0 for w in workers) == 2, "one worker had all jobs"
            await no_claim_is_left(rig)

    async def test_one_worker_alone_claims_and_does_not_wait(self) -> None:
        async with FleetRig() as rig:
            worker = await rig.decode()
            assert right(await ask(rig, 1))
            assert (worker.counters["claims"], worker.counters["claims_joined"]) == (1, 0)

    async def test_with_little_to_compute_nothing_is_said(self) -> None:
        async with FleetRig() as rig:
            worker = await rig.decode()
            client = rig.client()
            await client.generate(token_ids=prompt(0, tail=0), max_tokens=3)
            said = worker.counters["claims"]
            answer = await client.generate(token_ids=prompt(0, tail=3), max_tokens=3)
            assert list(answer.token_ids) == completion(prompt(0, tail=3), 3)
            assert worker.counters["claims"] == said == 1

    async def test_many_in_one_worker_are_joined_there(self) -> None:
        async with FleetRig() as rig:
            await decoders(rig, 2, max_running=4)
            assert right(await ask(rig, 8))
            assert total(list(rig.workers.values())) == PREFIX + 8 * TAIL
            await no_claim_is_left(rig)

    async def test_a_job_that_waits_for_another_worker_leaves_its_slot_and_its_blocks_to_others(self) -> None:
        async with FleetRig() as rig:
            await rig.prefill("prefill-0", slow(0.3), max_jobs=1)
            await decoders(rig, 3, step_s=0.0, prefill_patience_s=10.0)
            client = rig.client()
            first = asyncio.create_task(client.generate(token_ids=prompt(0), max_tokens=3))
            await leader_of(rig)
            free = await rig.prefill("prefill-1", FakeEngine(blocks=PREFIX + TAIL), max_jobs=1)
            joiner = asyncio.create_task(client.generate(token_ids=prompt(1), max_tokens=3))
            await waits_for_others([free])
            other = [token + 1 for token in prompt(2)[:-1] if token < 999]
            answer = await client.generate(token_ids=other, max_tokens=3)
            assert list(answer.token_ids) == completion(other, 3)
            assert not joiner.done()
            assert not first.done()
            assert free.counters["jobs_done"] == 1
            assert [list(a.token_ids) for a in await asyncio.gather(first, joiner)] == [
                completion(prompt(n), 3) for n in range(2)
            ]
            assert total([free, rig.workers["prefill-0"]]) == PREFIX + 2 * TAIL + len(other) // 4
            await no_claim_is_left(rig)

    async def test_a_job_that_finds_no_room_when_its_turn_comes_lets_others_go_first(self) -> None:
        async with FleetRig() as rig:
            await rig.prefill("prefill-0", slow(0.2), max_jobs=1)
            await decoders(rig, 3, step_s=0.0, prefill_patience_s=10.0)
            client = rig.client()
            first = asyncio.create_task(client.generate(token_ids=prompt(0), max_tokens=3))
            await leader_of(rig)
            busy = await rig.prefill("prefill-1", slow(0.4), max_jobs=1)
            joiner = asyncio.create_task(client.generate(token_ids=prompt(1), max_tokens=3))
            await waits_for_others([busy])
            other = [token + 1 for token in prompt(2)[:-1] if token < 999]
            long = asyncio.create_task(client.generate(token_ids=other, max_tokens=3))
            await first
            await asyncio.sleep(0.2)
            assert not long.done()
            assert len(busy._claim_log._holders) == 1
            assert list((await joiner).token_ids) == completion(prompt(1), 3)
            assert list((await long).token_ids) == completion(other, 3)
            assert busy.counters["claims"] == 3, "it claims again when there is room"
            assert total([busy, rig.workers["prefill-0"]]) == PREFIX + 2 * TAIL + len(other) // 4
            await no_claim_is_left(rig)


class TestLeaders:
    @pytest.mark.parametrize("prefill", [0, 2])
    async def test_killed_half_way(self, prefill: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its silence tells; nobody's patience would last so short."""
        monkeypatch.setattr("services.prefill.loading.CLAIM_PATIENCE_S", 30.0)
        async with FleetRig() as rig:
            await prefillers(rig, prefill, step_s=0.05, max_jobs=2)
            await decoders(rig, 4, step_s=0.05, prefill_patience_s=30.0)
            began = time.monotonic()
            asking = asyncio.create_task(ask(rig, 4))
            await rig.kill(await leader_of(rig))
            assert right(await asking)
            assert time.monotonic() - began < 6.0
            assert ended(rig) >= 1
            assert total(list(rig.workers.values())) <= PREFIX + 4 * TAIL + 4, "those that are left computed it once"
            await no_claim_is_left(rig)

    @pytest.mark.parametrize("role", ["decode", "prefill"])
    async def test_told_to_stop_half_way(self, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """It says that its claims have ended, before its silence would tell: nobody waits for what it handed back."""
        monkeypatch.setattr("services.prefill.loading.CLAIM_PATIENCE_S", 30.0)
        slowly = {"prefill_patience_s": 30.0, "peer_timeout_s": 30.0, "drain_s": 0.1}
        async with FleetRig() as rig:
            await prefillers(rig, 2 if role == "prefill" else 0, step_s=0.05, max_jobs=2, **slowly)
            await decoders(rig, 2 if role == "decode" else 4, step_s=0.05, **slowly)
            asking = asyncio.create_task(ask(rig, 4))
            leader = await leader_of(rig)
            await waits_for_others(list(rig.workers.values()))
            joined = next(name for name, worker in rig.workers.items() if worker.counters["claims_joined"])
            stopped = leader if role == "decode" else joined
            assert stopped.startswith(role)
            await rig.drain(stopped)
            drained = time.monotonic()
            assert right(await asking)
            assert time.monotonic() - drained < 6.0
            assert total(list(rig.workers.values())) <= PREFIX + 4 * TAIL + 4
            await no_claim_is_left(rig)

    async def test_frozen_half_way(self) -> None:
        async with FleetRig() as rig:
            await decoders(rig, 4, step_s=0.05, prefill_patience_s=30.0)
            began = time.monotonic()
            asking = asyncio.create_task(ask(rig, 4))
            frozen = await leader_of(rig)
            for bus in rig._buses[frozen]:
                bus.disconnect()
            assert right(await asking)
            assert time.monotonic() - began < 6.0
            assert ended(rig) >= 1
            others = [w for name, w in rig.workers.items() if name != frozen]
            assert total(others) <= PREFIX + 4 * TAIL

    async def test_alive_but_without_progress(self) -> None:
        """Its beats come and its engine hangs: who waits loses patience."""
        async with FleetRig() as rig:
            await decoders(rig, 1, prefill_patience_s=0.5)
            hanging = rig.engines["decode-0"]
            asking = asyncio.create_task(ask(rig, 2))
            await leader_of(rig)
            hanging._step_s = 1.5
            await rig.decode("decode-1", slow(), max_running=1, step_tokens=16, prefill_patience_s=0.5)
            other = rig.workers["decode-1"]
            async with asyncio.timeout(2.0):
                while other.counters["claims_taken_over"] < 1:
                    await asyncio.sleep(0.01)
            hanging._step_s = 0.0
            assert right(await asking)

    @pytest.mark.parametrize("prefill", [0, 2])
    async def test_cancelled_half_way(self, prefill: int) -> None:
        """Its worker lives, and what is computed already is not computed again."""
        async with FleetRig() as rig:
            await prefillers(rig, prefill, step_s=0.05, max_jobs=1)
            await decoders(rig, 2, step_s=0.05, prefill_patience_s=5.0)
            client = rig.client()
            leader = asyncio.create_task(client.generate(token_ids=prompt(0), max_tokens=3, id="leader"))
            await leader_of(rig)
            joiner = asyncio.create_task(client.generate(token_ids=prompt(1), max_tokens=3, id="joiner"))
            await waits_for_others(list(rig.workers.values()))
            await client.cancel("leader")
            cancelled = time.monotonic()
            assert list((await joiner).token_ids) == completion(prompt(1), 3)
            assert time.monotonic() - cancelled < 2.5
            assert (await leader).finish_reason == "cancelled"
            assert ended(rig) == 1
            await no_claim_is_left(rig)

    async def test_its_name_used_again_after_its_death(self) -> None:
        """Claims of the life before are its own, and it says that they hold no longer."""
        async with FleetRig() as rig:
            await decoders(rig, 1, step_s=0.05)
            asking = asyncio.create_task(ask(rig, 1))
            await leader_of(rig)
            await rig.kill("decode-0")
            worker = await rig.decode("decode-0", slow(), step_tokens=16)
            assert right(await asking)
            assert worker.counters["claims_joined"] == 0
            await no_claim_is_left(rig)
            log = await rig.bus().read(SUBJECTS.claim_stream, SUBJECTS.claims)
            assert sum(b"ended" in entry.data for entry in log) >= 2


class TestLog:
    async def test_garbage(self) -> None:
        garbage = [
            b"",
            b"\xc1",
            b"{",
            b"\x91" * 5000,
            b"\x80\x04K\x01.",
            encode(Claim(worker="x"))[:-1],
            bytes(400_000),
        ]
        garbage.append(encode(Claim(worker="x", names=b"n" * CLAIM_NAME)).replace(b"n" * CLAIM_NAME, b"n" * 15 + b""))
        garbage.append(encode(Claim(worker="nobody", names=b"n" * CLAIM_NAME, ended=[1, 2, 2**63 - 1])))
        async with FleetRig() as rig:
            await decoders(rig, 4)
            bus = rig.bus()
            for data in garbage:
                await bus.publish(SUBJECTS.claims, data)
            asking = asyncio.create_task(ask(rig, 4))
            for data in garbage * 3:
                await bus.publish(SUBJECTS.claims, data)
                await asyncio.sleep(0.01)
            assert right(await asking)
            workers = list(rig.workers.values())
            assert all(w.counters["claims_bad"] >= len(garbage) - 1 for w in workers)
            assert total(workers, "failed_steps") == 0

    async def test_a_false_claim_delays_a_prefix_by_one_patience(self) -> None:
        """Of a worker that lives, and never computes."""
        async with FleetRig() as rig:
            worker = await rig.decode(prefill_patience_s=0.4)
            await rig.drafter()
            names: list[bytes] = []
            Lineage.of(FakeEngine().identity, DEFAULT_TENANT).extend(names, PREFIX, prompt(), 4)
            false = Claim(worker="drafter-1", names=b"".join(short(names)))
            await rig.bus().append(SUBJECTS.claims, encode(false))
            began = time.monotonic()
            assert right(await ask(rig, 1))
            assert 0.4 < time.monotonic() - began < 2.0
            assert worker.counters["claims_taken_over"] == 1

    async def test_deleted_under_way(self) -> None:
        async with FleetRig() as rig:
            await decoders(rig, 4)
            asking = asyncio.create_task(ask(rig, 4))
            await leader_of(rig)
            del rig.broker.streams[SUBJECTS.claim_stream]
            assert right(await asking)
            assert total(list(rig.workers.values()), "claims_failed") > 0
            await no_claim_is_left(rig)
            assert SUBJECTS.claim_stream in rig.broker.streams
            for number, worker in enumerate(rig.workers.values()):
                worker.counters.clear()
                rig.engines[f"decode-{number}"]._step_s = 0.02
            client = rig.client()
            others = [[t + 1 for t in prompt(n)[:-1]] for n in range(4)]  # a prefix that nobody has
            others = [[t % 1000 for t in tokens] for tokens in others]
            await asyncio.gather(*(client.generate(token_ids=tokens, max_tokens=1) for tokens in others))
            assert total(list(rig.workers.values())) == PREFIX + 4 * TAIL

    @pytest.mark.parametrize("trouble", ["slow", "full", "gone"])
    @pytest.mark.parametrize("prefill", [0, 2])
    async def test_that_cannot_be_used(self, prefill: int, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Everybody computes for themselves, and nobody waits for the log long."""
        append = MemoryBus.append

        async def troubled(bus: MemoryBus, subject: str, data: Any, **options: Any) -> int:
            if subject == SUBJECTS.claims:
                if trouble == "slow":
                    await asyncio.sleep(30)
                raise StreamFull("full") if trouble == "full" else StreamMissing("gone")
            return await append(bus, subject, data, **options)

        monkeypatch.setattr(MemoryBus, "append", troubled)
        async with FleetRig() as rig:
            await prefillers(rig, prefill, step_s=0.0)
            await decoders(rig, 2, step_s=0.0)
            began = time.monotonic()
            assert right(await ask(rig, 2))
            assert time.monotonic() - began < 2.0
            assert total(list(rig.workers.values()), "claims_failed") == 2

    async def test_an_append_that_was_never_heard_back_about(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The claim is there, its maker does not know: it ends it when it sees it."""
        append, lost = MemoryBus.append, asyncio.Event()

        async def deaf(bus: MemoryBus, subject: str, data: Any, **options: Any) -> int:
            seq = await append(bus, subject, data, **options)
            if subject == SUBJECTS.claims and not lost.is_set():
                lost.set()
                raise BusDisconnected("no answer")
            return seq

        monkeypatch.setattr(MemoryBus, "append", deaf)
        async with FleetRig() as rig:
            worker = await rig.decode(max_running=1)
            client = rig.client()
            for number in range(2):
                answer = await client.generate(token_ids=prompt(number), max_tokens=3)
                assert list(answer.token_ids) == completion(prompt(number), 3)
            assert worker.counters["claims"] == worker.counters["claims_failed"] == 1
            await no_claim_is_left(rig)
            log = await rig.bus().read(SUBJECTS.claim_stream, SUBJECTS.claims)
            claims = [decode(entry.data, Claim) for entry in log]
            assert sorted(seq for c in claims for seq in c.ended) == [n for n, c in enumerate(claims, 1) if c.names]


@pytest.fixture
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as running:
        yield running


@pytest.mark.parametrize("prefill", [0, 2])
async def test_on_a_real_server(server: EmbeddedNats, prefill: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block once, while nobody's patience ends: with the log, with who computes, with word of what is stored.

    Beyond that everybody computes for themselves. A machine that stalls for half a second gets there, so here all have
    more patience than it may need.
    """
    monkeypatch.setattr("shared.cache.claim_log.DEADLINE_S", 20.0)
    monkeypatch.setattr("shared.cache.claim_log.SETTLE_S", 5.0)
    monkeypatch.setattr("services.prefill.loading.CLAIM_PATIENCE_S", 30.0)
    patient = {"prefill_patience_s": 30.0, "peer_timeout_s": 30.0}
    spare = [await NatsBus.connect(server.url, name="rig", wait=5) for _ in range(2 * (4 + prefill) + 1)]
    async with NatsRig(spare) as rig:
        await prefillers(rig, prefill, step_s=0.05, max_jobs=2, **patient)
        await decoders(rig, 4, step_s=0.05, **patient)
        assert right(await ask(rig, 4))
        workers = list(rig.workers.values())
        assert all(total(workers, limit) == 0 for limit in ("claims_failed", "claims_given_up", "claims_taken_over"))
        assert total(workers) == PREFIX + 4 * TAIL
        assert total(workers, "claims_joined") > 0
        await no_claim_is_left(rig)
