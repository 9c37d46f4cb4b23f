"""What the commands that ask a fleet's NATS server have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from shared.bus.base import Bus
from shared.bus.login import Login
from shared.config import Settings

CONNECT_S = 5.0
T = TypeVar("T")

Nats = Annotated[str | None, typer.Option(help="nats://HOST:PORT.")]
Model = Annotated[str | None, typer.Option(help="The model's name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")]


def ask(nats: str | None, model: str | None, question: Callable[[Bus, str], Awaitable[T]]) -> T:
    """`question(bus, the model's name)` on a connection of its own; what is not given comes from the settings."""

    async def answer() -> T:
        from shared.bus.nats import NatsBus

        settings = Settings()
        url, login = nats or settings.nats_url, Login.of(settings)
        bus = await NatsBus.connect(url, name="trine-cli", login=login, wait=CONNECT_S)
        try:
            return await question(bus, model or settings.served_name)
        finally:
            await bus.close()

    return asyncio.run(answer())
