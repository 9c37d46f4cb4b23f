"""A fleet as its NATS server tells of it: who beats there, and what its streams hold."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from shared.bus.base import Bus, Incoming
from shared.config import Settings
from shared.errors import BusError, PermissionDenied
from shared.subjects import ALL_BEATS, Subjects
from trine.picture import ModelRow, picture
from trine.roster import Roster

LISTEN_S = 2.5
"""So that every worker is heard twice: then its counters have gone somewhere."""


@dataclass(frozen=True, slots=True)
class StreamRow:
    model: str
    stream: str
    """requests, prefill, cache, events, claims, attempts or dead."""
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Status:
    nats: str
    """The server's address, without a password."""
    guarded: bool | None
    """Whether it asks who one is; None: not known."""
    models: list[ModelRow]
    streams: list[StreamRow] | None
    """None: this user may not ask."""

    def as_dict(self) -> dict[str, Any]:
        models = [{k: v for k, v in row.as_dict().items() if k != "history"} for row in self.models]
        return {**asdict(self), "models": models}


@asynccontextmanager
async def listening(bus: Bus) -> AsyncIterator[Roster]:
    """Hears beats of all models while it is open. Raises PermissionDenied that says who may."""
    roster = Roster(Settings().peer_timeout_s)

    async def note(message: Incoming) -> None:
        roster.hear(message, time.monotonic())

    try:
        subscription = await bus.subscribe(ALL_BEATS, note)
    except PermissionDenied as error:
        told = f"{error.message}: log in as the operator (TRINE_NATS_USER=operator, TRINE_NATS_PASSWORD)"
        raise PermissionDenied(told) from None
    try:
        yield roster
    finally:
        with contextlib.suppress(BusError):
            await subscription.unsubscribe()


async def status(bus: Bus, address: str, model: str, seconds: float = LISTEN_S) -> Status:
    """`model` is looked at even if no worker of it is heard. Raises BusError."""
    async with listening(bus) as roster:
        await asyncio.sleep(seconds)
        models = picture(roster, time.monotonic())
    names = sorted({model, *(row.model for row in models)})
    return Status(address, bus.authenticated, models, await stream_rows(bus, names))


async def stream_rows(bus: Bus, models: list[str]) -> list[StreamRow] | None:
    rows: list[StreamRow] = []
    for model in models:
        for kind, stream in _streams(Subjects(model)).items():
            try:
                state = await bus.stream_state(stream)
            except PermissionDenied:
                return None
            except BusError:
                continue  # it is not there, or not now
            rows.append(StreamRow(model, kind, state.messages, state.bytes))
    return rows


def _streams(subjects: Subjects) -> dict[str, str]:
    return {
        "requests": subjects.request_stream,
        "prefill": subjects.prefill_stream,
        "cache": subjects.block_stream,
        "events": subjects.event_stream,
        "claims": subjects.claim_stream,
        "attempts": subjects.attempt_stream,
        "dead": subjects.dead_stream,
    }
