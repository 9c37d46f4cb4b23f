"""Tenants on a real server: what its permissions say is who somebody is."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from unittest import mock

import pytest

from shared.bus.base import Incoming
from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.errors import InvalidField, PermissionDenied
from shared.subjects import Subjects
from tests.fake_engine import completion
from tests.fleet_rig import MODEL, FleetRig
from tests.nats_rig import NatsRig
from trine.access import ROLES, configuration, variable
from trine.client import Client
from trine.completion import Completion
from trine.missed import stored_events
from trine.stream import Stream

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

TENANTS = ("acme", "globex")
PASSWORDS = {variable(user): f"of-{user}" for user in (*ROLES, *TENANTS)}
PROMPT = list(range(100, 141))  # ten blocks and a token


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedNats]:
    with mock.patch.dict(os.environ, PASSWORDS), EmbeddedNats(config=configuration([MODEL], TENANTS)) as running:
        yield running


def url(server: EmbeddedNats, user: str) -> str:
    return server.url.replace("nats://", f"nats://{user}:of-{user}@")


@pytest.fixture
async def rig(server: EmbeddedNats) -> AsyncIterator[FleetRig]:
    users = ("prefill", "prefill", "decode", "decode")  # the last ones are taken first
    spare = [await NatsBus.connect(url(server, user), name="rig", wait=5) for user in users]
    async with NatsRig(spare) as fleet:
        await fleet.decode()
        await fleet.prefill()
        yield fleet


async def ask(server: EmbeddedNats, user: str, tenant: str | None = None, **more: str) -> Completion:
    async with Client(url(server, user), MODEL, tenant=tenant or user) as client:
        answer = await client.generate(token_ids=PROMPT, max_tokens=3, **more)  # type: ignore[arg-type]
    assert list(answer.token_ids) == completion(PROMPT, 3)
    return answer


async def test_a_tenant_shares_with_itself_and_with_nobody_else(rig: FleetRig, server: EmbeddedNats) -> None:
    for user in ("acme", "globex"):
        assert (await ask(server, user)).usage.cached_tokens == 0
        assert (await ask(server, user)).usage.cached_tokens == 40
        assert (await ask(server, user, cache_salt="s")).usage.cached_tokens == 0
        assert (await ask(server, user, cache_salt="s")).usage.cached_tokens == 40
    assert rig.workers["prefill-1"].counters["jobs_done"] == 4


async def test_the_server_refuses_who_says_to_be_another(rig: FleetRig, server: EmbeddedNats) -> None:
    for tenant in ("globex", "default"):
        with pytest.raises(PermissionDenied):
            await ask(server, "acme", tenant)
    bus = await NatsBus.connect(url(server, "acme"), name="acme", wait=5)
    subjects = Subjects(MODEL)
    for subject in (subjects.request("high"), subjects.drop, subjects.handover("decode-1"), subjects.block(bytes(32))):
        with pytest.raises(PermissionDenied):
            await bus.append(subject, b"x", timeout=2.0)
    for subject in (
        subjects.events("r", "globex"),
        subjects.all_held,
        subjects.beats,
        "_INBOX.>",
        "_INBOX.decode.>",
        subjects.requests[1],
        ">",
    ):
        with pytest.raises(PermissionDenied):
            await bus.subscribe(subject, ignore)
    await bus.close()


async def ignore(message: Incoming) -> None:
    raise AssertionError(f"{message.subject} was heard")


async def test_an_ack_cancels_nobody(rig: FleetRig, server: EmbeddedNats) -> None:
    """Permissions do not cover reply subjects: the server's ack goes wherever the publisher says."""
    globex = await NatsBus.connect(url(server, "globex"), name="globex", wait=5)
    subjects = Subjects(MODEL)
    async with Client(url(server, "acme"), MODEL, tenant="acme") as client:
        stream = client.stream(token_ids=PROMPT, max_tokens=400, id="victim")
        events = aiter(stream)
        await anext(events)
        reply = subjects.cancel("victim", "acme")
        await globex.publish(subjects.request("normal", "globex"), b'{"id":"g","prompt":"1"}', reply=reply)
        await globex.publish("trine.nobody.req.normal.globex", b'{"id":"g","prompt":"1"}', reply=reply)
        async for _ in events:
            pass
    assert stream.completion.finish_reason == "length"
    assert rig.workers["decode-1"].counters["bad_messages"] >= 1
    await globex.close()


async def test_nobody_can_use_up_another_tenants_message_id(rig: FleetRig, server: EmbeddedNats) -> None:
    globex = await NatsBus.connect(url(server, "globex"), name="globex", wait=5)
    subject = Subjects(MODEL).request("normal", "globex")
    for guess in ("order-1", "acme/order-1"):
        await globex.append(subject, b'{"id":"g","prompt":"1"}', message_id=guess)
    async with Client(url(server, "acme"), MODEL, tenant="acme") as client:
        for _ in range(2):  # and an id may be used again
            answer = await client.generate(token_ids=PROMPT, max_tokens=3, id="order-1")
            assert list(answer.token_ids) == completion(PROMPT, 3)
    await globex.close()


async def test_a_tenant_is_told_what_it_missed(
    rig: FleetRig, server: EmbeddedNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not read the event stream; a worker reads it for whoever may ask."""
    lost: list[str] = []

    async def deaf(self: Stream, message: Incoming) -> None:
        lost.append(message.subject)

    monkeypatch.setattr(Stream, "_on_event", deaf)
    answer = await ask(server, "acme")
    assert lost
    assert answer.usage.completion_tokens == 3
    async with Client(url(server, "acme"), MODEL, tenant="acme") as client:
        rest = client.resume(answer.id, 1)
        tokens = [token async for delta in rest for token in delta.token_ids]
    assert tokens == completion(PROMPT, 3)[1:]
    acme = await NatsBus.connect(url(server, "acme"), name="acme", wait=5)
    with pytest.raises(PermissionDenied):
        await stored_events(acme, Subjects(MODEL), "r", "globex", 0, 2.0)
    await acme.close()


async def test_one_id_of_two_tenants_at_once(rig: FleetRig, server: EmbeddedNats) -> None:
    async with (
        Client(url(server, "acme"), MODEL, tenant="acme") as acme,
        Client(url(server, "globex"), MODEL, tenant="globex") as globex,
    ):
        long = acme.stream(token_ids=PROMPT, max_tokens=300, id="r")
        events = aiter(long)
        await anext(events)
        answer = await globex.generate(token_ids=PROMPT[1:], max_tokens=3, id="r")
        assert list(answer.token_ids) == completion(PROMPT[1:], 3)
        await globex.cancel("r")  # its own, which has ended
        async for _ in events:
            pass
        assert list(long.completion.token_ids) == completion(PROMPT, 300)


async def test_where_anybody_gets_in_a_subject_proves_nothing() -> None:
    with EmbeddedNats() as anonymous:
        spare = [await NatsBus.connect(anonymous.url, name="rig", wait=5) for _ in range(2)]
        async with NatsRig(spare) as rig:
            await rig.decode()
            async with Client(anonymous.url, MODEL, tenant="acme") as client:
                with pytest.raises(InvalidField, match="credentials"):
                    await client.generate(token_ids=PROMPT, max_tokens=3)
