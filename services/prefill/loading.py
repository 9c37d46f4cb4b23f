"""Brings what a job need not compute: blocks of the shared cache, and those that other workers are computing."""

from __future__ import annotations

from collections.abc import Callable

from services.prefill.scheduler import PrefillScheduler, PrefillTask
from shared.cache.blocks import BlockAllocator
from shared.cache.claims import Claims, Flight, Need
from shared.cache.prefix import PrefixCache

CLAIM_PATIENCE_S = 3.0
"""Without a new block from another worker for so long, it is computed here: before who asked for it gives up."""


class Loader:
    """Every wait ends: by blocks, by a deadline, by the end of the task or of the worker it waits for."""

    def __init__(
        self, scheduler: PrefillScheduler, allocator: BlockAllocator, cache: PrefixCache, claims: Claims
    ) -> None:
        self._scheduler = scheduler
        self._allocator = allocator
        self._cache = cache
        self._claims = claims

    def known(self, task: PrefillTask) -> int:
        """How many of a task's blocks, from the first on, pool and shared cache have."""
        pooled = self._allocator.peek(task.names)
        return pooled + self._cache.longest(task.names[pooled:])

    async def wait(self, task: PrefillTask, joins: Callable[[], None]) -> Flight | None:
        """`lead` for a task that holds neither slot nor blocks: what others compute is in the cache, and not fetched.

        `joins()` is called when it has to wait for others.
        """

        async def fetch(upto: int) -> None:
            """When there is room."""

        need = Need(task.names, lambda: self.known(task), lambda: not task.ended, fetch, joins)
        return await self._claims.lead(need, CLAIM_PATIENCE_S)

    async def lead(self, task: PrefillTask) -> Flight | None:
        """Of what is missing, nobody else computes what is still missing afterwards."""

        async def fetch(upto: int) -> None:
            await self.fetch(task)

        need = Need(task.names, lambda: task.have, lambda: not task.ended, fetch)
        return await self._claims.lead(need, CLAIM_PATIENCE_S)

    async def fetch(self, task: PrefillTask) -> None:
        """Blocks from the shared cache into the task's own; stops at the first that is not to be had."""
        first = task.have
        upto = first + self._cache.longest(task.names[first:])

        def claim(index: int) -> int | None:
            return None if task.ended else task.table[first + index]

        def take(index: int) -> bool:
            if not task.ended:  # else its blocks may belong to somebody else by now
                self._scheduler.filled(task, first + index)
            return not task.ended

        await self._cache.fetch([task.meta(i) for i in range(first, upto)], claim, take)
