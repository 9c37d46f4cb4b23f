"""The shared prefix cache as its users see it.

A miss is always an answer: missing, late, evicted, damaged, bus down. Whoever misses recomputes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.bus.base import Bus, StreamSpec
from shared.cache import frames
from shared.cache.frames import BlockMeta
from shared.cache.index import PrefixIndex
from shared.messages import Identity
from shared.subjects import Subjects

NATS_HEADERS = 4 << 10


@dataclass(frozen=True, slots=True)
class PutReport:
    """Numbers of blocks. What failed is not in the cache; nothing else follows from it."""

    stored: int = 0
    existed: int = 0
    failed: int = 0


class Fetched(dict[bytes, memoryview]):
    """Payloads by block name, each verified; `producers` are the workers that computed them."""

    def __init__(self) -> None:
        super().__init__()
        self.producers: set[str] = set()


class BlockStore(Protocol):
    """Blocks by name.

    Counters: hit + miss = blocks asked for, reject = damaged or foreign ones among the misses; put + exists +
    put_failed = blocks offered; bytes_in and bytes_out count payload bytes; refreshed = parts written again.
    """

    @property
    def counters(self) -> Mapping[str, int]: ...

    async def put(self, blocks: Sequence[tuple[BlockMeta, memoryview]], timeout: float = 10.0) -> PutReport:
        """Store what is not there yet. Payloads must not change until it returns.

        Raises FrameError for a payload that contradicts the identity (a bug here), nothing for trouble elsewhere.
        """
        ...

    async def get(
        self, blocks: Sequence[BlockMeta], timeout: float = 5.0, places: Sequence[memoryview] | None = None
    ) -> Fetched:
        """Those of `blocks` that could be had in time and are exactly what was asked for; raises nothing.

        `places` are where the bytes go, one for each block: they are written to until this returns, and hold garbage
        where the block was not found. Without them new memory is taken for all at once.
        """
        ...

    async def close(self) -> None: ...


def block_stream(subjects: Subjects, max_bytes: int) -> StreamSpec:
    """The cache's stream: in memory, one message per part, the oldest evicted beyond `max_bytes`."""
    return StreamSpec(
        name=subjects.block_stream,
        subjects=(subjects.blocks,),
        storage="memory",
        discard="old",
        max_bytes=max_bytes,
        max_msgs_per_subject=1,
        # A message larger than max_bytes would be accepted and leave the stream empty.
        max_msg_size=min(frames.MAX_FRAME + NATS_HEADERS, max_bytes),
        allow_direct=True,
    )


def index_for(bus: Bus, identity: Identity) -> PrefixIndex:
    """An empty index for blocks of this identity on this (connected) bus."""
    return PrefixIndex(frames.part_count(identity.block_bytes, frames.part_bytes_for(bus.max_payload, identity)))
