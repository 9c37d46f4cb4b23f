"""What the commands that ask a fleet's NATS server have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, TypeVar

import typer

from shared.bus.base import Bus
from shared.bus.login import Login
from shared.config import Settings

CONNECT_S = 5.0
T = TypeVar("T")

Nats = Annotated[str | None, typer.Option(help="nats://HOST:PORT; TRINE_NATS_URL unless given.")]
Model = Annotated[str | None, typer.Option(help="The model's name; TRINE_MODEL_NAME unless given.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")]


@asynccontextmanager
async def connected(nats: str | None, model: str | None) -> AsyncIterator[tuple[Bus, str]]:
    """(a connection, the model's name); what is not given comes from the settings. Raises BusDisconnected."""
    from shared.bus.nats import NatsBus

    settings = Settings()
    bus = await NatsBus.connect(address(nats), name="trine-cli", login=Login.of(settings), wait=CONNECT_S)
    try:
        yield bus, model or settings.served_name
    finally:
        await bus.close()


def address(nats: str | None) -> str:
    """Of the NATS server: as given, or as set."""
    return nats or Settings().nats_url


def ask(nats: str | None, model: str | None, question: Callable[[Bus, str], Awaitable[T]]) -> T:
    """`question(bus, the model's name)` on a connection of its own."""

    async def answer() -> T:
        async with connected(nats, model) as (bus, name):
            return await question(bus, name)

    return asyncio.run(answer())
