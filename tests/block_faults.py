"""A fleet whose cached blocks are delayed, dropped, damaged and swapped on their way; the control messages are not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shared.bus.base import Incoming, Stored
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.memory_stream import MemoryStream
from shared.cache import naming
from shared.codec import decode_event
from shared.messages import Failed, Identity
from shared.subjects import Subjects
from shared.tenants import DEFAULT_TENANT
from tests.cache_rig import eventually
from tests.fake_engine import completion
from tests.fleet_rig import MODEL, FleetRig
from trine.client import Client
from trine.completion import Completion

SUBJECTS = Subjects(MODEL)
Damage = Callable[[Stored], Stored | None]


@dataclass
class BlockFaults:
    """What happens to blocks between workers and the cache's stream. Times are in seconds per block."""

    damage: Damage | None = None
    """Changes a block that is read, or loses it (None)."""
    refuse: Callable[[], Exception] | None = None
    """What every write ends with."""
    read_s: float = 0.0
    write_s: float = 0.0
    reading: int = 0
    """Blocks on their way to a reader."""


class FaultyBus(MemoryBus):
    """`faults` tells those of the moment."""

    def __init__(self, broker: MemoryBroker, faults: Callable[[], BlockFaults]) -> None:
        super().__init__(broker)
        self._faults = faults

    async def append(self, subject: str, data: bytes | Sequence[bytes | memoryview], **options) -> int:
        if ".kv." in subject:
            faults = self._faults()
            await asyncio.sleep(faults.write_s)
            if faults.refuse is not None:
                raise faults.refuse()
        return await super().append(subject, data, **options)

    async def get_many(self, stream: str, subjects: Sequence[str], timeout: float = 5.0) -> dict[str, Stored]:
        if stream != SUBJECTS.block_stream:
            return await super().get_many(stream, subjects, timeout)
        faults = self._faults()
        found = await super().get_many(stream, subjects, timeout)
        if faults.damage is not None:
            found = {subject: changed for subject, m in found.items() if (changed := faults.damage(m)) is not None}
        faults.reading += len(subjects)
        try:
            await asyncio.sleep(faults.read_s * len(subjects))
        finally:
            faults.reading -= len(subjects)
        return found


class FaultyFleet(FleetRig):
    """`FleetRig` with `faults` between its workers and the shared cache; those in `faults_of` have their own."""

    def __init__(self, *, authenticated: bool = False) -> None:
        super().__init__()
        self.broker = MemoryBroker(authenticated=authenticated)
        self.faults = BlockFaults()
        self.faults_of: dict[str, BlockFaults] = {}

    async def __aenter__(self) -> FaultyFleet:
        await super().__aenter__()
        return self

    def bus(self, owner: str = "test") -> MemoryBus:
        bus = FaultyBus(self.broker, lambda: self.faults_of.get(owner, self.faults))
        self._buses.setdefault(owner, []).append(bus)
        return bus

    @property
    def cache(self) -> MemoryStream:
        """The shared cache's stream."""
        return self.broker.streams[SUBJECTS.block_stream]

    async def stored(self, blocks: int) -> None:
        """Wait until the shared cache has so many blocks, each of one part."""
        await eventually(lambda: self.cache.state().messages >= blocks)

    async def warm(self, prompt: Sequence[int], worker: str = "warmer") -> None:
        """Leave the prompt's full blocks in the shared cache, and no worker that has them."""
        await self.decode(worker)
        blocks = self.cache.state().messages
        await ask(self.client(), prompt, 2)
        await self.stored(blocks + len(prompt) // 4)
        await self.kill(worker)

    def count(self, worker: str, name: str) -> int:
        """One of the counters in a worker's beat."""
        return self.workers[worker].beat().counters.get(name, 0)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


async def ask(client: Client, token_ids: Sequence[int], count: int = 5, *, weights: int = 0, **options) -> Completion:
    """The answer, which must be the right one."""
    answer = await client.generate(token_ids=token_ids, max_tokens=count, **options)
    assert list(answer.token_ids) == completion(token_ids, count, weights), "another text"
    assert answer.usage.prompt_tokens == len(token_ids)
    assert answer.usage.completion_tokens == count
    return answer


async def refusal(rig: FleetRig, fields: str, tenant: str = DEFAULT_TENANT) -> Failed:
    """The one event that a request with these fields, as JSON, is answered with."""
    bus, request_id = rig.bus(), f"r{random.random()}"
    answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def on_event(message: Incoming) -> None:
        answer.set_result(message.data)

    events = await bus.subscribe(SUBJECTS.events(request_id, tenant), on_event)
    await bus.publish(SUBJECTS.request("normal", tenant), f'{{"id":"{request_id}",{fields}}}'.encode())
    event = decode_event(await asyncio.wait_for(answer, 5))
    await events.unsubscribe()
    assert isinstance(event, Failed)
    return event


def subjects_of(
    identity: Identity, token_ids: Sequence[int], tenant: str = DEFAULT_TENANT, salt: str = ""
) -> list[str]:
    """Where the full blocks of these tokens are stored."""
    names = naming.chain(naming.root(identity, tenant, salt), token_ids, identity.block_size)
    return [SUBJECTS.block(name, scope=tenant) for name in names]


def _flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def damages(stream: MemoryStream, victims: Sequence[str]) -> dict[str, Damage]:
    """Faults of the blocks stored on the subjects `victims`, at least two, in `stream`; by name."""

    def only(change: Callable[[Stored], Stored | None], message: Stored) -> Stored | None:
        return change(message) if message.subject == victims[0] else message

    def swapped(message: Stored) -> Stored:
        swaps = {victims[0]: victims[1], victims[1]: victims[0]}
        other = stream.last(swaps.get(message.subject, message.subject))
        return message if other is None else replace(message, data=other.data)

    return {
        "flipped": partial(only, lambda m: replace(m, data=_flip(m.data))),
        "truncated": partial(only, lambda m: replace(m, data=m.data[:-3])),
        "dropped": partial(only, lambda m: None),
        "swapped": swapped,
    }
