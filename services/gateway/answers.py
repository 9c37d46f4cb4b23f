"""The answers to one HTTP request, as they come: its requests to the fleet run side by side and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

import structlog

from shared.errors import TrineError
from trine.completion import Completion
from trine.merge import Delta
from trine.stream import Stream

QUEUED = 64
"""Pieces that wait for a slow reader; the client library then holds what comes, within bounds."""
TICK_S = 0.5

log = structlog.get_logger()
Item = Delta | Completion


class Answers:
    """`async with Answers(...) as answers`: leaving cancels what is not complete, and does not return before.

    Each stream has a task of its own, that is cancelled once and then left in peace: it has to tell the workers.
    `check` is called before each piece, and twice a second while none comes (it is told which). It raises when waiting
    is of no use any more.
    """

    def __init__(self, streams: Sequence[Stream], check: Callable[[bool], None]) -> None:
        self._streams = streams
        self._check = check
        self._items: asyncio.Queue[tuple[int, Item | TrineError]] = asyncio.Queue(QUEUED)
        self._tasks: list[asyncio.Task[None]] = []
        self._error: TrineError | None = None

    async def __aenter__(self) -> Answers:
        self._tasks = [asyncio.create_task(self._pump(i, stream)) for i, stream in enumerate(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, timeout: float) -> list[tuple[int, Item]]:
        """(choice, what came of it) of all that has come; waits for something, and is empty when nothing came.

        The first error of any choice is raised, after what came before it.
        """
        self._check(False)
        found: list[tuple[int, Item]] = []
        came = await self._wait(timeout) if self._error is None else None
        while came is not None:
            choice, item = came
            if isinstance(item, TrineError):
                self._error = item
                break
            found.append((choice, item))
            came = None if self._items.empty() else self._items.get_nowait()
        if self._error is not None and not found:
            raise self._error
        return found

    async def _wait(self, timeout: float) -> tuple[int, Item | TrineError] | None:
        if not self._items.empty():
            return self._items.get_nowait()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while (left := deadline - loop.time()) > 0:
            try:
                async with asyncio.timeout(min(left, TICK_S)):
                    return await self._items.get()
            except TimeoutError:
                self._check(True)
        return None

    async def _pump(self, choice: int, stream: Stream) -> None:
        try:
            async with stream:
                async for delta in stream:
                    await self._items.put((choice, delta))
                await self._items.put((choice, stream.completion))
        except TrineError as error:
            await self._items.put((choice, error))
        except Exception:
            log.exception("an answer could not be followed", request=stream.id)
            await self._items.put((choice, TrineError("internal error in the gateway")))
