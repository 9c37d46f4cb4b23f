"""What the shared prefix cache of a model holds and how it does; dropping what it should not hold."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from dataclasses import dataclass, field

from shared.bus.base import Bus, Incoming
from shared.cache.naming import PUBLIC
from shared.codec import decode, encode
from shared.errors import RequestError, StreamMissing, UnknownModel
from shared.messages import Beat, Drop, Dropped
from shared.subjects import Subjects, block_of
from trine.beats import listen

BEATS_S = 1.5
ANSWERS_S = 3.0
SHOWN = {PUBLIC: "(public)"}


@dataclass(frozen=True, slots=True)
class Share:
    """What one tenant has in the cache's stream. `bytes`: as many as an average block's, frames included."""

    tenant: str
    blocks: int
    bytes: int


@dataclass(slots=True)
class Stat:
    """Counters of all workers since they started, and bytes by tier."""

    model: str
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    """By worker: `hit`, `miss`, … of the stream, `host_hit` … of the host tier, `pool_hit` … of its pool, `joined`."""
    stream_bytes: int = 0
    stream_blocks: int = 0

    @property
    def totals(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for counts in self.counters.values():
            total.update(counts)
        return dict(total)


@dataclass(slots=True)
class DropReport:
    messages: int = 0
    """Removed from the stream: one a block, or one for each part of a large block."""
    done: list[Dropped] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """Workers that did not say in time that they have forgotten theirs."""


async def shares(bus: Bus, model: str) -> list[Share]:
    """By tenant, the largest first. Raises UnknownModel when there is no such cache."""
    subjects = Subjects(model)
    try:
        found = await bus.subject_counts(subjects.block_stream, subjects.blocks)
        state = await bus.stream_state(subjects.block_stream)
    except StreamMissing:
        raise UnknownModel(f"no prefix cache of a model {model!r}", field="model") from None
    names: dict[str, set[bytes]] = {}
    messages: Counter[str] = Counter()
    for subject, count in found.items():
        with contextlib.suppress(ValueError):  # anybody who may publish there
            scope, name, _ = block_of(subject)
            names.setdefault(scope, set()).add(name)
            messages[scope] += count
    each = state.bytes / max(state.messages, 1)
    rows = [Share(scope, len(blocks), round(messages[scope] * each)) for scope, blocks in names.items()]
    return sorted(rows, key=lambda share: -share.bytes)


async def stat(bus: Bus, model: str) -> Stat:
    """Raises UnknownModel when nothing is heard or stored of the model."""
    subjects = Subjects(model)
    found = Stat(model)
    for beat in await _workers(bus, subjects):
        found.counters[beat.worker] = _of_cache(beat)
    try:
        state = await bus.stream_state(subjects.block_stream)
        found.stream_bytes, found.stream_blocks = state.bytes, sum(share.blocks for share in await shares(bus, model))
    except StreamMissing:
        if not found.counters:
            raise UnknownModel(f"no workers and no prefix cache of a model {model!r}", field="model") from None
    return found


def _of_cache(beat: Beat) -> dict[str, int]:
    counts = {name.removeprefix("cache_"): n for name, n in beat.counters.items() if name.startswith("cache_")}
    joined = beat.counters.get("prefill_joined", 0) + beat.counters.get("claims_joined", 0)
    return {**counts, **({"joined": joined} if joined else {})}


async def _workers(bus: Bus, subjects: Subjects) -> list[Beat]:
    """Those that hold blocks."""
    seen = await listen(bus, BEATS_S, subjects.beats)
    return [beat for _, beat in sorted(seen.items()) if beat.role != "drafter"]


async def drop(bus: Bus, model: str, scope: str | None) -> DropReport:
    """Remove the blocks of a scope (a tenant, or `naming.PUBLIC`), or all, from every tier of every machine.

    The stream is purged before the workers are told, and again after: none puts back what it held. Blocks of requests
    that are being answered just now may come back with their end.
    """
    subjects = Subjects(model)
    waiting = {beat.worker for beat in await _workers(bus, subjects)}
    report, order, answered = DropReport(), uuid.uuid4().hex, asyncio.Event()
    report.messages += await _purge(bus, subjects, scope)

    async def note(message: Incoming) -> None:
        with contextlib.suppress(RequestError):
            report.done.append(decode(message.data, Dropped))
            waiting.discard(report.done[-1].worker)
        if not waiting:
            answered.set()

    subscription = await bus.subscribe(subjects.dropped(order), note)
    try:
        await bus.publish(subjects.drop, encode(Drop(scope=scope)), reply=subjects.dropped(order))
        if waiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(answered.wait(), ANSWERS_S)
    finally:
        await subscription.unsubscribe()
    report.messages += await _purge(bus, subjects, scope)
    report.silent = sorted(waiting)
    return report


async def _purge(bus: Bus, subjects: Subjects, scope: str | None) -> int:
    wanted = subjects.blocks if scope is None else subjects.blocks_of(scope)
    try:
        return await bus.purge(subjects.block_stream, wanted)
    except StreamMissing:
        return 0
