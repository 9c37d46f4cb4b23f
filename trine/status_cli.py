"""`trine status`, `trine top` and `trine models`."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from trine.asking import AsJson, Model, Nats, address, ask, connected
from trine.console import reported
from trine.picture import picture
from trine.rendered import shown_models, shown_status, shown_top
from trine.status import LISTEN_S, listening, status


@reported
def show_status(nats: Nats = None, model: Model = None, as_json: AsJson = False) -> None:
    """Workers by role, queues, cache and streams of all models on a NATS server, at one moment."""
    found = ask(nats, model, lambda bus, name: status(bus, address(nats), name))
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        Console(highlight=False).print(shown_status(found))


@reported
def models(nats: Nats = None, as_json: AsJson = False) -> None:
    """Models that workers are heard of, and whether they are served."""
    found = ask(nats, None, lambda bus, name: status(bus, address(nats), name)).models
    if as_json:
        print(json.dumps([{"model": row.model, "served": row.served} for row in found]))
    else:
        Console(highlight=False).print(shown_models(found))


@reported
def top(
    nats: Nats = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Workers by role, queues and cache as they change, until Ctrl-C. Without a terminal: one look."""
    asyncio.run(_top(nats, every, Console(highlight=False)))


async def _top(nats: str | None, every: float, console: Console) -> None:
    async with connected(nats, None) as (bus, _), listening(bus) as roster:
        if not console.is_terminal:
            await asyncio.sleep(LISTEN_S)
            console.print(shown_top(picture(roster, time.monotonic()), address(nats), time.strftime("%H:%M:%S")))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                now = time.strftime("%H:%M:%S")
                live.update(shown_top(picture(roster, time.monotonic()), address(nats), now), refresh=True)
                await asyncio.sleep(every)
