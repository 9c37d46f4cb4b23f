"""Messages that nobody should send, on every subject that exists. The server under attack has no permissions.

Not sent is what only permissions can stop: a valid message in another's name, such as an end on the event subject of
somebody else's request. See docs/security.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Callable

import msgpack

from shared.bus.base import Handler, Incoming
from shared.bus.nats import NatsBus
from shared.codec import decode, encode
from shared.errors import BusError, RequestError
from shared.messages import Beat, DraftAsk, DraftItem, Generate, Identity
from shared.subjects import PRIORITIES, Subjects
from tests.draft_forgeries import FORGERIES, answer, draft

ROUNDS = 3
FLOOD_MESSAGE = 32 << 10
COPIES = 40
HUGE = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff\x00",
    b"\x91" * 5000,
)
"""Arrays, maps, bytes and text that say they are longer than any memory, and depth without end."""


def garbage(rng: random.Random) -> bytes:
    choice = rng.randrange(5)
    if choice == 0:
        return rng.choice(HUGE)
    if choice == 1:
        return b'{"id":' * rng.randrange(1, 2000)
    if choice == 2:
        fields = {"v": 1, "type": rng.choice(("generate", "beat", "claim", "prefill", "tokens")), "id": "x" * 300}
        whole: bytes = msgpack.packb(fields)
        return whole[: rng.randrange(1, len(whole) + 1)]
    return rng.randbytes(rng.choice((0, 1, 30, 4096, 100_000)))


def spoilt(rng: random.Random, data: bytes) -> bytes:
    """A real message with an error in it."""
    if not data or rng.random() < 0.3:
        return data[: rng.randrange(len(data) + 1)]
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def targets(subjects: Subjects, rng: random.Random) -> list[str]:
    """A subject of each kind. Ids are nobody's, workers are real."""
    foreign = f"foreign-{rng.randrange(1000)}"
    worker = f"{rng.choice(('decode', 'prefill'))}-{rng.randrange(1, 3)}"
    name = rng.randbytes(32)
    return [
        *(subjects.request(priority, rng.choice(("default", "acme"))) for priority in PRIORITIES),
        subjects.refused(),
        subjects.prefill(name),
        subjects.block(name, rng.randrange(3)),
        subjects.claims,
        subjects.drop,
        subjects.dropped(foreign),
        subjects.events(foreign),
        subjects.attempt(rng.randrange(10**6, 10**7), 1),
        subjects.dead(foreign),
        subjects.again(foreign),
        subjects.held(worker),
        subjects.handover(worker),
        subjects.draft("drafter-1"),
        subjects.cancel(foreign),
        subjects.beat(rng.choice(("prefill", "decode", "drafter")), worker),
        subjects.beat("decode", "ghost"),
    ]


def liar(rng: random.Random) -> bytes:
    """A beat of a worker that does not exist and would not fit."""
    identity = Identity(fingerprint=rng.randbytes(32).hex(), codec="int4", block_size=8, block_bytes=1 << 40)
    return encode(Beat(role="decode", worker="ghost", life="x", identity=identity))


async def attack(bus: NatsBus, subjects: Subjects, rng: random.Random) -> None:
    for _ in range(ROUNDS):
        for subject in targets(subjects, rng):
            data = garbage(rng)
            for reply in ("", f"_INBOX.{rng.randrange(1000)}"):
                await bus.publish(subject, data, {"Trine-Request": "-1"}, reply)
        await bus.publish(subjects.beat("decode", "ghost"), liar(rng))
        await asyncio.sleep(0.1)


async def corrupt_blocks(bus: NatsBus, subjects: Subjects, rng: random.Random, seconds: float) -> None:
    """Blocks, claims and summaries that workers publish are published again, with an error or under another name."""
    seen: list[Incoming] = []

    async def spoil(message: Incoming) -> None:
        if len(seen) >= COPIES:
            return
        seen.append(message)
        await bus.publish(message.subject, spoilt(rng, message.data), message.headers)
        await bus.publish(rng.choice(seen).subject if "kv" in message.subject else message.subject, message.data)

    async with _listening(bus, spoil, subjects.blocks, subjects.claims, subjects.all_held):
        await asyncio.sleep(seconds)


async def forge_drafts(bus: NatsBus, subjects: Subjects, rng: random.Random, seconds: float) -> None:
    """Asks are answered before the drafter does, wrongly."""

    def wrong(item: DraftItem) -> list[bytes]:
        return [answer(draft(item, [rng.randrange(3, 128) for _ in range(item.k)]))]

    forgeries: list[Callable[[DraftItem], list[bytes]]] = [wrong, *(forgery.answers for forgery in FORGERIES.values())]

    async def forge(message: Incoming) -> None:
        with contextlib.suppress(RequestError):
            for item in decode(message.data, DraftAsk).items[:1]:
                for data in rng.choice(forgeries)(item):
                    await bus.publish(message.reply, data)

    async with _listening(bus, forge, subjects.draft("drafter-1")):
        await asyncio.sleep(seconds)


@contextlib.asynccontextmanager
async def _listening(bus: NatsBus, handler: Handler, *names: str) -> AsyncIterator[None]:
    subscriptions = [await bus.subscribe(name, handler) for name in names]
    try:
        yield
    finally:
        for subscription in subscriptions:
            with contextlib.suppress(BusError):
                await subscription.unsubscribe()


async def fill_queue(bus: NatsBus, subjects: Subjects, rng: random.Random, most: int) -> None:
    """More requests than may wait, of which each would take a while."""
    for number in range(2 * most):
        request = Generate(id=f"flood-{rng.randrange(1 << 40)}-{number}", token_ids=[5] * 30, max_tokens=200)
        await bus.publish(subjects.request("low"), encode(request))


async def fill_stream(bus: NatsBus, subject: Callable[[bytes], str], rng: random.Random, total: int) -> None:
    """As many bytes as `total` in messages with new names that are no blocks and no jobs."""
    data = struct.pack(">I", 0xFFFFFFF0) + rng.randbytes(FLOOD_MESSAGE)
    for _ in range(total // FLOOD_MESSAGE):
        await bus.publish(subject(rng.randbytes(32)), data)
        await asyncio.sleep(0)
