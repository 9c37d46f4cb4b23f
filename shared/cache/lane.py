"""A link and the turn to use it: one blocking call at a time, in a thread, first come first served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import anyio

from shared.bus.base import Bus
from shared.bus.block_link import BlockLink

T = TypeVar("T")


async def in_thread(work: Callable[[], T], hurry: Callable[[], None] = lambda: None) -> T:
    """What `work` returns. When cancelled, this still waits for its end: it may write into memory that the caller
    gives back afterwards. So `work` must end by itself, by a deadline; `hurry` is called to make it end soon."""
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        await asyncio.wait([future])
    except asyncio.CancelledError:
        hurry()
        with anyio.CancelScope(shield=True):
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
        future.exception()  # nobody else will ask
        raise
    return future.result()


class Lane:
    """A call that is cancelled gives up its link; the next one takes a new one. None does after `close`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._link = bus.link()  # connects when it is used
        self._turn = asyncio.Lock()
        self._closed = False

    async def run(self, work: Callable[[BlockLink], T]) -> T:
        async with self._turn:
            link = self._link
            return await in_thread(lambda: work(link), self._renew)

    def _renew(self) -> None:
        self._link.close()
        if not self._closed:
            self._link = self._bus.link()

    def close(self) -> None:
        """For good: calls that wait, and later ones, end with an error."""
        self._closed = True
        self._link.close()
