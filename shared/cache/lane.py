"""A link and the turn to use it: one blocking call at a time, in a thread, first come first served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio

from shared.bus.base import Bus
from shared.bus.block_link import BlockLink

T = TypeVar("T")


async def in_thread(work: Callable[[], T], hurry: Callable[[], None] = lambda: None) -> T:
    """What `work` returns. When cancelled, this still waits for its end: it may write into memory that the caller
    gives back afterwards. So `work` must end by itself, by a deadline; `hurry` is called to make it end soon."""
    future = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
                hurry()
    if cancelled is not None:
        future.exception()  # nobody else will ask
        raise cancelled
    return future.result()


class Lane:
    """The link is made when it is first needed, and anew after a call was cancelled."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._link: BlockLink | None = None
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[BlockLink], T]) -> T:
        async with self._turn:
            link = self._link = self._link or self._bus.link()
            return await in_thread(lambda: work(link), self.close)

    def close(self) -> None:
        """A call that waits ends with an error."""
        if self._link is not None:
            self._link.close()
            self._link = None
