"""With the shipped configuration every role and every tenant can do its whole work, over TLS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from shared.actor import RETRY_S
from shared.bus.base import Bus, Incoming
from shared.codec import encode
from shared.config import DEFAULT_MODEL
from shared.errors import UnknownModel
from shared.messages import DeadLetter
from tests.contract.conftest import eventually
from tests.fake_engine import completion
from tests.secure_rig import SUBJECTS, TENANTS, Secure, SecureFleet, secure_server
from trine import cache, dead
from trine.completion import Completion
from trine.readiness import up
from trine.stream import Stream

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

LENGTH = 41  # ten blocks and a token


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    with secure_server(tmp_path_factory.mktemp("certificates")) as running:
        yield running


@pytest.fixture
async def rig(secure: Secure) -> AsyncIterator[SecureFleet]:
    async with SecureFleet(secure) as fleet:
        for name in ("decode-1", "decode-2"):
            await fleet.decode(name, draft_adaptive=False)
        await fleet.prefill()
        await fleet.drafter()
        yield fleet
        for name, worker in fleet.workers.items():
            assert worker.bus.counters["denied"] == 0, name
            assert all(bus.counters["denied"] == 0 for bus in fleet._buses[name]), name


async def ask(secure: Secure, user: str, tenant: str | None = None, *, about: int, count: int = 12) -> Completion:
    """`about`: another prompt for each; what was cached of one stays in the server."""
    prompt = list(range(about, about + LENGTH))
    async with secure.client(user, tenant) as client:
        answer = await client.generate(token_ids=prompt, max_tokens=count)
    assert list(answer.token_ids) == completion(prompt, count)
    return answer


async def test_all_roles_and_tenants_at_work(rig: SecureFleet, secure: Secure) -> None:
    for tenant in TENANTS:
        assert (await ask(secure, tenant, about=50)).usage.cached_tokens == 0
        assert (await ask(secure, "gateway", tenant, about=50)).usage.cached_tokens == 40
    await asyncio.gather(*(ask(secure, tenant, about=50, count=40) for tenant in TENANTS for _ in range(4)))
    total = sum((worker.counters for worker in rig.workers.values()), start=type(rig.workers["decode-1"].counters)())
    assert total["jobs_done"] > 0  # of the prefill worker
    assert total["accepted_tokens"] > 0
    assert total["claims"] > 0


async def test_a_block_goes_from_worker_to_worker(rig: SecureFleet, secure: Secure) -> None:
    """Over the bulk connections, as two users."""
    await ask(secure, "acme", about=100)
    assert rig.workers["prefill-1"].more_counters()["cache_put"] >= 10
    assert sum(rig.workers[name].more_counters().get("cache_hit", 0) for name in ("decode-1", "decode-2")) >= 10


async def test_what_a_tenant_missed_is_told(rig: SecureFleet, secure: Secure, monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(self: Stream, message: Incoming) -> None:
        pass

    monkeypatch.setattr(Stream, "_on_event", deaf)
    await asyncio.gather(
        ask(secure, "globex", about=150, count=3), ask(secure, "gateway", "globex", about=150, count=3)
    )
    async with secure.client("globex") as client:
        for _ in range(2):
            await client.generate(token_ids=list(range(150, 150 + LENGTH)), max_tokens=3)
        assert client._connected().counters["denied"] == 1, "the first refusal tells that it may not read the events"


async def test_cancelling_and_models_that_nobody_serves(rig: SecureFleet, secure: Secure) -> None:
    async with secure.client("acme") as client:
        stream = client.stream(token_ids=list(range(200, 200 + LENGTH)), max_tokens=400)
        async for _ in stream:
            await stream.cancel()
        assert stream.completion.finish_reason == "cancelled"
        with pytest.raises(UnknownModel):
            await client.generate(token_ids=list(range(200, 200 + LENGTH)), model="another")


async def test_an_operator_looks_and_drops(rig: SecureFleet, secure: Secure) -> None:
    await ask(secure, "acme", about=250)
    bus = await secure.connect("operator")
    await eventually(lambda: has(bus, "acme"))
    report = await cache.drop(bus, DEFAULT_MODEL, None)
    assert {done.worker for done in report.done} == {"decode-1", "decode-2", "prefill-1"}
    assert report.silent == []
    assert (await ask(secure, "acme", about=250)).usage.cached_tokens == 0
    letter = DeadLetter(
        id="dead",
        tenant="acme",
        subject=SUBJECTS.request("normal", "acme"),
        request=b'{"id":"dead","prompt":"1"}',
        code="poison",
        reason="it killed two workers",
        attempts=2,
        workers=[],
        at=0.0,
    )
    await rig.workers["decode-1"].bus.append(SUBJECTS.dead("dead", "acme"), encode(letter))
    assert await dead.retry(bus, DEFAULT_MODEL, "dead") > 0
    assert bus.counters["denied"] == 0
    await bus.close()


async def has(bus: Bus, tenant: str) -> bool:
    return tenant in {share.tenant for share in await cache.shares(bus, DEFAULT_MODEL)}


async def test_who_comes_first_waits_and_a_restarted_server_gets_its_streams_back(secure: Secure) -> None:
    """Prefill workers may not create streams."""
    operator = await secure.connect("operator")
    for stream in (SUBJECTS.prefill_stream, SUBJECTS.block_stream, SUBJECTS.claim_stream):
        await operator.request(f"$JS.API.STREAM.DELETE.{stream}", b"", 5.0)
    async with SecureFleet(secure) as rig:
        first = asyncio.create_task(rig.prefill())
        await asyncio.sleep(0.3)
        assert not first.done()
        await rig.decode()
        began = time.monotonic()
        await first
        assert time.monotonic() - began < RETRY_S + 1.0, "its wait ends soon after there is a decode worker"
        assert (await ask(secure, "acme", about=300)).served_by.prefill == ["prefill-1"]
        secure.server.kill()
        await secure.server.start_async()
        await eventually(lambda: all(worker.bus.connected for worker in rig.workers.values()), within=15)
        assert list((await ask(secure, "acme", about=300)).token_ids) == completion(list(range(300, 300 + LENGTH)), 12)
        jobs = rig.workers["prefill-1"].counters["jobs_done"]
        async with secure.client("globex") as client:
            await eventually(lambda: client._bus is not None and client._bus.connected)
            await client.generate(token_ids=list(range(300, 300 + LENGTH)), max_tokens=3)
        assert rig.workers["prefill-1"].counters["jobs_done"] > jobs
    await operator.close()


async def test_readiness_is_heard_by_every_role(rig: SecureFleet, secure: Secure) -> None:
    from trine.beats import listen

    for user in ("decode", "prefill", "drafter", "gateway", "operator"):
        bus = await secure.connect(user)
        seen = await listen(bus, 3.0, SUBJECTS.beats, lambda seen: len(seen) == 4)
        assert up(seen) == {"decode": 2, "prefill": 1, "drafter": 1}
        await bus.close()
