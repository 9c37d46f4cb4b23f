"""With the shipped configuration: what each user may do, tried by all of them; who else tries is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from shared.bus.base import Incoming
from shared.bus.block_link import Item, Reader
from shared.bus.nats import NatsBus
from shared.cache.store import block_stream
from shared.codec import encode
from shared.config import DEFAULT_MODEL, Settings
from shared.errors import PermissionDenied
from shared.messages import Beat
from shared.streams import event_stream, request_consumers, request_stream
from tests.contract.conftest import eventually
from tests.fleet_rig import COMMON
from tests.secure_rig import SUBJECTS as S
from tests.secure_rig import USERS, Secure, SecureFleet, secure_server
from trine.beats import listen

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

API = "$JS.API."
CACHE_BYTES = 64 << 20
BLOCK = bytes(32)
WORKERS = ("prefill", "decode")
REQ, PREFILL, TOK, KV, CLAIM = (
    S.request_stream,
    S.prefill_stream,
    S.event_stream,
    S.block_stream,
    S.claim_stream,
)
SETTINGS = Settings(model_name=DEFAULT_MODEL, ack_wait_s=COMMON["ack_wait_s"])
STREAMS = (REQ, PREFILL, TOK, KV, CLAIM, S.attempt_stream, S.dead_stream)

PUBLISH: dict[str, tuple[str, ...]] = {
    # requests, and what belongs to them
    S.request("normal"): ("default", "gateway", "operator"),
    S.request("high", "acme"): ("acme", "gateway", "operator"),
    f"{S.prefix}.req.never-pulled.acme": (),
    f"{S.prefix}.req.never-pulled": (),
    f"{S.prefix}.req.high.acme.more": (),
    S.cancel("r"): ("default", "gateway"),
    S.cancel("r", "acme"): ("acme", "gateway"),
    S.again("r"): ("default", "gateway"),
    S.again("r", "acme"): ("acme", "gateway"),
    S.room: ("default", "acme", "globex", "gateway"),
    S.events("r"): ("decode",),
    S.events("r", "acme"): ("decode",),
    S.refused("acme"): ("decode",),
    # the cache
    S.block(BLOCK): WORKERS,
    S.block(BLOCK, 0, "acme"): WORKERS,
    S.claims: WORKERS,
    S.drop: ("operator",),
    S.dropped("order"): WORKERS,
    # between workers
    S.prefill(BLOCK): ("decode",),
    S.draft("drafter-1"): ("decode",),
    S.handover("decode-1"): ("decode",),
    S.held("decode-1"): ("decode",),
    S.attempt(1, 1): ("decode",),
    S.dead("r"): ("decode",),
    S.beat("decode", "decode-9"): ("decode",),
    S.beat("prefill", "prefill-9"): ("prefill",),
    S.beat("drafter", "drafter-9"): ("drafter",),
    "_INBOX.decode.stolen.1": (),
    "_INBOX.acme.stolen.1": (),
    # who is there
    "$SRV.PING": ("operator",),
    "$SRV.STATS.trine-decode.decode-1": ("operator",),
    "_INBOX.operator.1": ("prefill", "gateway"),
    # JetStream
    f"{API}STREAM.NAMES": ("decode", "gateway", "operator", "default", "acme", "globex"),
    f"{API}INFO": ("operator",),
    f"{API}STREAM.LIST": ("operator",),
    f"{API}STREAM.CREATE.SPY": ("operator",),
    **{f"{API}STREAM.CREATE.{name}": ("decode", "operator") for name in STREAMS},
    **{f"{API}STREAM.{verb}.{name}": ("operator",) for verb in ("UPDATE", "DELETE", "PURGE") for name in STREAMS},
    **{f"{API}STREAM.{verb}.{TOK}": ("operator",) for verb in ("MSG.GET", "MSG.DELETE", "SNAPSHOT")},
    f"{API}STREAM.INFO.{REQ}": ("decode", "operator"),
    f"{API}STREAM.INFO.{TOK}": ("decode", "operator"),
    f"{API}STREAM.INFO.{KV}": (*WORKERS, "operator"),
    f"{API}DIRECT.GET.{REQ}": ("operator",),
    f"{API}DIRECT.GET.{S.dead_stream}": ("operator",),
    f"{API}DIRECT.GET.{TOK}": ("decode", "operator"),
    f"{API}DIRECT.GET.{KV}": (*WORKERS, "operator"),
    f"{API}DIRECT.GET.{TOK}.{S.events('r', 'acme')}": ("operator",),
    f"{API}DIRECT.GET.{KV}.{S.block(BLOCK)}": ("operator",),
    f"{API}CONSUMER.CREATE.{REQ}": ("operator",),
    f"{API}CONSUMER.CREATE.{REQ}.spy": ("operator",),
    f"{API}CONSUMER.CREATE.{TOK}.spy.{S.events('r', 'acme')}": ("operator",),
    f"{API}CONSUMER.CREATE.{KV}.spy.{S.block(BLOCK)}": (*WORKERS, "operator"),
    f"{API}CONSUMER.CREATE.{KV}.spy.{S.blocks}": (*WORKERS, "operator"),
    f"{API}CONSUMER.DURABLE.CREATE.{REQ}.spy": ("operator",),
    f"{API}CONSUMER.DELETE.{REQ}.decode-high": ("operator",),
    f"{API}CONSUMER.MSG.NEXT.{REQ}.decode-high": ("decode", "operator"),
    f"{API}CONSUMER.MSG.NEXT.{PREFILL}.prefill": ("prefill", "operator"),
    f"$JS.ACK.{REQ}.decode-high.1.1.1.1.0": ("decode",),
    f"$JS.ACK.{PREFILL}.prefill.1.1.1.1.0": ("prefill",),
    "$JS.SNAPSHOT.ACK.x": ("operator",),
    "$JS.SNAPSHOT.RESTORE.x": ("operator",),
    "$SYS.REQ.SERVER.PING": (),
    "$SYS.REQ.USER.INFO": (),
}
SUBSCRIBE: dict[str, tuple[str, ...]] = {
    ">": (),
    "*.>": (),
    "trine.>": (),
    f"{S.prefix}.>": (),
    "_INBOX.>": (),
    "$JS.>": (),
    "$SYS.>": (),
    **{f"_INBOX.{user}.>": (user,) for user in USERS},
    S.requests[0]: ("decode",),
    S.requests[1]: ("decode",),
    S.request("high", "acme"): ("decode",),
    f"{S.prefix}.tok.>": ("default", "gateway"),  # what `default` hears there is another test
    "trine.*.tok.>": ("default", "gateway"),
    "trine.*.tok.*.>": ("gateway",),
    S.all_events[0]: ("default", "gateway"),
    S.events("r"): ("default", "gateway"),
    S.all_events[1]: ("gateway",),
    S.events("*", "acme").replace("=2A", "*"): ("acme", "gateway"),
    S.events("r", "acme"): ("acme", "gateway"),
    S.events("r", "globex"): ("globex", "gateway"),
    S.refused("acme"): ("acme", "gateway"),
    S.cancels: WORKERS,
    S.cancel("r", "acme"): WORKERS,
    S.agains: ("decode",),
    S.room: ("decode",),
    S.blocks: (),
    S.block(BLOCK): (),
    S.claims: (),
    S.prefills: (),
    S.attempts: (),
    S.dead(None, None): (),
    S.draft("drafter-1"): ("drafter",),
    S.handover("decode-1"): ("decode",),
    S.all_held: ("decode",),
    S.drop: WORKERS,
    S.dropped("order"): ("operator",),
    S.beats: (*WORKERS, "drafter", "gateway", "operator"),
    "$SRV.*": (*WORKERS, "drafter", "gateway"),
    "$SRV.>": (*WORKERS, "drafter", "gateway"),  # whoever may hear `$SRV.*`; only operators speak there
    **{f"$SRV.*.trine-{role}": (role,) for role in (*WORKERS, "drafter", "gateway")},
    **{f"$SRV.*.trine-{role}.*": (role,) for role in (*WORKERS, "drafter", "gateway")},
}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    with secure_server(tmp_path_factory.mktemp("certificates")) as running:
        yield running


@pytest.fixture(params=USERS)
async def user(request: pytest.FixtureRequest, secure: Secure) -> AsyncIterator[tuple[str, NatsBus]]:
    bus = await secure.connect(request.param)
    yield request.param, bus
    assert (bus.connected, bus.counters["reconnects"]) == (True, 0)
    await bus.close()


async def may_publish(bus: NatsBus, subject: str) -> bool:
    before = bus.counters["denied"]
    await bus.publish(subject, b"x")
    await bus._connection.flush(5.0)
    return bus.counters["denied"] == before


async def test_who_may_publish_what(user: tuple[str, NatsBus]) -> None:
    name, bus = user
    found = {subject for subject in PUBLISH if await may_publish(bus, subject)}
    assert found == {subject for subject, users in PUBLISH.items() if name in users}


async def test_who_may_hear_what(user: tuple[str, NatsBus]) -> None:
    name, bus = user
    found = set()
    for subject in SUBSCRIBE:
        for queue in ("", "group"):
            try:
                await (await bus.subscribe(subject, ignore, queue)).unsubscribe()
            except PermissionDenied:
                continue
            found.add(subject)
    assert found == {subject for subject, users in SUBSCRIBE.items() if name in users}


async def ignore(_: Incoming) -> None:
    pass


async def test_the_tenant_that_subjects_do_not_spell_hears_no_others(secure: Secure) -> None:
    """Allowed `tok.*`, it may subscribe to `tok.>`."""
    default, decode = await secure.connect("default"), await secure.connect("decode")
    heard: list[str] = []

    async def note(message: Incoming) -> None:
        heard.append(message.subject)

    for subject in (f"{S.prefix}.tok.>", "trine.*.tok.>", f"{S.prefix}.tok.*"):
        for queue in ("", f"queue of {subject}".replace(" ", "-")):
            await default.subscribe(subject, note, queue)
    for subject in (S.events("r", "acme"), S.events("r")):
        await decode.publish(subject, b"event")
    await eventually(lambda: len(heard) >= 6)
    assert heard == [S.events("r")] * 6
    await default.close()
    await decode.close()


async def test_every_action_is_somebody_s_and_no_client_has_more_than_its_own() -> None:
    """The tables themselves: nothing is refused to all because its name is wrong, and tenants have equal rights."""
    for table in (PUBLISH, SUBSCRIBE):
        assert {name for users in table.values() for name in users} == set(USERS)
    assert not any("globex" in users and "acme" not in users for users in PUBLISH.values())


@pytest.mark.parametrize("user", ["drafter", "acme"], indirect=True)
async def test_the_bulk_connection_has_the_same_rights(user: tuple[str, NatsBus]) -> None:
    def never(subject: str, seq: int, size: int, payload: Reader) -> None:
        raise AssertionError

    link = user[1].link()
    (answer,) = link.put([Item(S.block(BLOCK, 0, "acme"), (b"x",))], time.monotonic() + 5)
    assert isinstance(answer, PermissionDenied)
    with pytest.raises(PermissionDenied):
        link.get(KV, [S.block(BLOCK, 0, "acme")], never, time.monotonic() + 5)
    link.close()


async def test_who_is_asked_may_answer_once(secure: Secure) -> None:
    """And nothing else where answers come: a drafter knows the inbox of whoever asks it."""
    asker, drafter, other = [await secure.connect(name) for name in ("decode", "drafter", "drafter")]
    verdicts: list[bool] = []

    async def answer(message: Incoming) -> None:
        neighbour = f"{message.reply.rpartition('.')[0]}.0"
        for subject in (neighbour, message.reply, message.reply):
            verdicts.append(await may_publish(drafter, subject))
        verdicts.append(await may_publish(other, message.reply))

    await drafter.subscribe(S.draft("drafter-1"), answer)
    assert (await asker.request(S.draft("drafter-1"), b"?", 5.0)).data == b"x"
    await eventually(lambda: len(verdicts) == 4)
    assert verdicts == [False, True, False, False]
    for bus in (asker, drafter, other):
        await bus.close()


async def test_no_answer_to_a_worker_can_be_forged(secure: Secure) -> None:
    """A client sees in its events where their acks go, and the server acks a request to wherever it is told to."""
    decode, acme = await secure.connect("decode"), await secure.connect("acme")
    await decode.ensure_stream(event_stream(S))
    await decode.ensure_stream(request_stream(S, SETTINGS))
    seen: list[str] = []

    async def note(message: Incoming) -> None:
        seen.append(message.reply)

    await acme.subscribe(S.events("r", "acme"), note)
    for expected in range(1, 11):
        for reply in seen[-1:]:
            head, _, token = reply.rpartition(".")
            near = [f"{head}.{int(token) + step}" for step in (1, 2)] if token.isdecimal() and len(token) < 9 else []
            for guess in (reply, *near):
                await acme.publish(S.request("normal", "acme"), b"{}", reply=guess)
            await acme._connection.flush(5.0)
        assert await decode.append(S.events("r", "acme"), b"event") == expected
        await eventually(lambda count=expected: len(seen) == count)  # type: ignore[misc]
    tokens = [reply.rpartition(".")[2] for reply in seen]
    assert len(set(tokens)) == 10
    assert all(len(token) >= 16 for token in tokens)
    await decode.close()
    await acme.close()


async def test_the_server_does_nothing_on_behalf_of_who_may_not(secure: Secure) -> None:
    """Permissions do not cover where its acks and answers go, nor a message's headers."""
    decode, acme, globex = [await secure.connect(name) for name in ("decode", "acme", "globex")]
    for stream in (request_stream(S, SETTINGS), block_stream(S, CACHE_BYTES)):
        await decode.ensure_stream(stream)
    for consumer in request_consumers(S, SETTINGS):
        await decode.ensure_consumer(consumer)
    await decode.append(S.block(BLOCK), b"block")
    await globex.append(S.request("low", "globex"), b"{}")
    heard: list[Incoming] = []

    async def hear(message: Incoming) -> None:
        heard.append(message)

    await globex.subscribe(S.events("*", "globex").replace("=2A", "*"), hear)
    (job,) = await decode.pull(REQ, S.request_consumer("low"), 1, 5.0)
    orders = [f"{API}STREAM.{verb}.{name}" for verb in ("PURGE", "DELETE") for name in (KV, REQ)]
    orders += [f"{API}CONSUMER.DELETE.{REQ}.{S.request_consumer('low')}", job.handle]
    for order in orders:
        await acme.publish(S.request("high", "acme"), b"{}", reply=order)
        await acme.publish(f"{API}STREAM.NAMES", b"", reply=order)
    await acme.publish(S.request("high", "acme"), b"{}", headers={"Nats-Trace-Dest": S.events("r", "globex")})
    await acme._connection.flush(5.0)
    await decode._connection.flush(5.0)
    assert (await decode.stream_state(KV)).messages == 1
    assert set(await decode.get_many(KV, [S.block(BLOCK)])) == {S.block(BLOCK)}
    await job.hold()  # nobody else has ended it
    await job.nak()
    (again,) = await decode.pull(REQ, S.request_consumer("low"), 1, 5.0)
    assert again.seq == job.seq
    await again.ack()
    assert heard == []
    for bus in (decode, acme, globex):
        await bus.close()


async def test_a_drafter_is_no_other_worker(secure: Secure) -> None:
    async with SecureFleet(secure) as rig:
        worker = await rig.decode(cache_bytes=CACHE_BYTES)
        drafter, gateway = await secure.connect("drafter"), await secure.connect("gateway")
        for role in ("decode", "prefill"):
            beat = Beat(role=role, worker="x-9", identity=worker.identity())
            await drafter.publish(S.beat("drafter", "x-9"), encode(beat))
        await eventually(lambda: worker.counters["bad_messages"] >= 2)
        for role in ("decode", "prefill", "drafter"):
            assert not worker.peers.alive(role, time.monotonic())
        task = asyncio.create_task(listen(gateway, 0.5, S.beats))
        await asyncio.sleep(0.1)
        await drafter.publish(S.beat("drafter", "x-9"), encode(beat))
        assert {name for _, name in await task} == {"decode-1"}
        await drafter.close()
        await gateway.close()
