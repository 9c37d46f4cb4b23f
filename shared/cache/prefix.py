"""One worker's access to the shared prefix cache: index, tiers and publishers of its pool, wired together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import anyio
import structlog

from shared.bus.base import Bus, Incoming
from shared.bus.listening import listen
from shared.cache.blocks import BlockAllocator
from shared.cache.fetch import Claim, Take, fetch
from shared.cache.follower import IndexFollower
from shared.cache.frames import BlockMeta
from shared.cache.host_store import HostStore
from shared.cache.publisher import BlockPublisher
from shared.cache.store import BlockStore, block_stream, index_for
from shared.cache.stream_store import StreamBlockStore
from shared.cache.tiers import TieredStore
from shared.codec import decode, encode
from shared.engine.base import StepEngine
from shared.errors import BusError, RequestError
from shared.messages import Drop, Dropped
from shared.subjects import Subjects

HOST_POLL_S = 0.005
MAX_HOST_POLL_S = 0.04
"""How soon and how late a reader that waits looks again whether a block has come into the host tier: nobody tells."""
DROP_S = 3.0
"""How long what is on its way to be stored may hold up an order to forget it; later the order is not confirmed."""

log = structlog.get_logger(__name__)


class PrefixCache:
    """`bus` follows the index; bulk bytes take links of their own. `host` None: this worker shares no memory."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        cache_bytes: int,
        engine: StepEngine,
        allocator: BlockAllocator,
        worker: str,
        host: HostStore | None = None,
    ) -> None:
        identity = engine.identity
        self._bus = bus
        self._subjects = subjects
        self._worker = worker
        self._engine = engine
        self._allocator = allocator
        self._index = index_for(bus, identity)
        self._follower = IndexFollower(bus, subjects, self._index, block_stream(subjects, cache_bytes))
        stream = StreamBlockStore(bus, subjects, identity, self._index)
        self._store: BlockStore = stream
        self._to_stream = BlockPublisher(allocator, stream, self._index.present, engine.read_block, worker)
        self._publishers = [self._to_stream]
        self._bad_orders = 0
        self._host = host
        if host is not None:
            self._store = TieredStore(host, stream)
            self._publishers.append(BlockPublisher(allocator, host, host.has, engine.read_block, worker))

    @property
    def counters(self) -> Mapping[str, int]:
        """Of all tiers and the follower, for the beat: `cache_host_` the host tier's, `cache_pool_` the pool's."""
        pool = self._allocator.counters
        mine = {"pool_hit": pool.hits, "pool_evicted": pool.evictions, "bad_orders": self._bad_orders}
        counts = {**self._store.counters, **self._follower.counters, **mine}
        return {f"cache_{name}": n for name, n in counts.items() if n}

    @property
    def stream_bytes(self) -> int:
        """That the stream holds."""
        return self._follower.stored_bytes

    @property
    def host_bytes(self) -> int:
        """That the host tier holds, of all its processes."""
        return self._host.held_bytes if self._host is not None else 0

    async def start(self) -> None:
        """Raises ConfigError if the cache's stream exists with another configuration."""
        await listen(self._bus, self._subjects.drop, self._on_drop)
        await self._follower.start()
        if self._host is not None and (trouble := await self._host.open()):
            log.warning("no host tier: blocks are shared through NATS alone", reason=trouble)

    async def close(self) -> None:
        await self._follower.close()
        await self._store.close()

    # Operators' orders

    async def _on_drop(self, message: Incoming) -> None:
        try:
            scope = decode(message.data, Drop).scope
        except RequestError as error:
            self._bad_orders += 1
            log.warning("bad order to drop blocks", error=str(error))
            return
        done = None
        with anyio.move_on_after(DROP_S):
            done = await self.drop(scope)
        if done is None:
            log.warning("blocks not all dropped: some are still on their way", scope=scope or "all")
            return
        log.info("blocks dropped", scope=scope or "all", pool=done.pool_blocks, host=done.host_blocks)
        if message.reply:
            with suppress(BusError):
                await self._bus.publish(message.reply, encode(done))

    async def drop(self, scope: str | None) -> Dropped:
        """Forget what pool and host tier hold, and what is known of the stream, which whoever orders this purges.

        What is in use goes on, and is not found by anybody else. Pool and host tier do not know scopes apart and
        forget all: what others may still have comes back from the stream.
        """
        for publisher in self._publishers:
            await publisher.forget(scope)
        pool = self._allocator.forget()
        host = await self._host.drop() if self._host is not None else 0
        await self._follower.restart()
        return Dropped(worker=self._worker, pool_blocks=pool, host_blocks=host)

    # Reading

    def longest(self, names: Sequence[bytes]) -> int:
        """How many of `names`, from the first on, can be fetched."""
        length = 0
        while length < len(names):
            step = self._index.longest(names[length:])
            if self._host is not None:
                step = max(step, self._host.longest(names[length:]))
            if not step:
                break
            length += step
        return length

    async def wait(self, names: Sequence[bytes], timeout: float) -> int:
        """As `longest`, as soon as it is not 0, and at the latest after `timeout` seconds."""
        if self._host is None or not names:
            return await self._follower.wait(names, timeout)
        deadline, pause = time.monotonic() + timeout, HOST_POLL_S
        while not (length := self.longest(names)) and (left := deadline - time.monotonic()) > 0:
            await self._follower.wait(names, min(left, pause))
            pause = min(2 * pause, MAX_HOST_POLL_S)
        return length

    async def fetch(self, wanted: Sequence[BlockMeta], claim: Claim, take: Take) -> set[str]:
        """See `shared.cache.fetch`."""
        return await fetch(self._store, self._engine, self._allocator, wanted, claim, take)

    # Writing

    def offer(self, meta: BlockMeta) -> None:
        """The pool has this block: publish it where it is not known."""
        for publisher in self._publishers:
            publisher.offer(meta)

    def share(self, meta: BlockMeta) -> None:
        """The pool has this block from the stream: let this machine's other workers have it without."""
        for publisher in self._publishers[1:]:
            publisher.offer(meta)

    async def publish(self) -> None:
        """Side task: store what was offered."""
        async with anyio.create_task_group() as group:
            for publisher in self._publishers:
                group.start_soon(publisher.run)

    async def settled(self, names: Sequence[bytes]) -> None:
        """Returns when none of these blocks waits to be stored in the stream any more."""
        await self._to_stream.settled(names)
