"""What SIGTERM does to a worker: it drains one that serves, and ends one that does not yet, or drains already."""

from __future__ import annotations

import signal
from typing import cast

import anyio
import pytest

from shared.actor import Actor
from shared.worker import _stop_on_signals

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


class Living:
    def __init__(self, *, ready: bool, draining: bool = False) -> None:
        self.ready, self.draining = anyio.Event(), anyio.Event()
        for event, there in ((self.ready, ready), (self.draining, draining)):
            if there:
                event.set()


async def ended_by_sigterm(*actors: Living) -> bool:
    """Whether the worker's tasks are cancelled."""
    with anyio.move_on_after(5) as limit:
        async with anyio.create_task_group() as group:
            group.start_soon(_stop_on_signals, cast("list[Actor]", list(actors)), group.cancel_scope)
            await anyio.sleep(0.05)
            signal.raise_signal(signal.SIGTERM)
            await anyio.sleep(0.2)
            if group.cancel_scope.cancel_called:
                return True
            group.cancel_scope.cancel()
            return False
    assert not limit.cancelled_caught
    return group.cancel_scope.cancel_called


async def test_a_worker_that_serves_drains() -> None:
    worker = Living(ready=True)
    assert not await ended_by_sigterm(worker)
    assert worker.draining.is_set()


async def test_one_that_waits_for_a_connection_ends() -> None:
    worker = Living(ready=False)
    assert await ended_by_sigterm(worker)
    assert not worker.draining.is_set()


async def test_one_that_has_not_even_loaded_ends() -> None:
    assert await ended_by_sigterm()


async def test_one_that_drains_already_ends() -> None:
    assert await ended_by_sigterm(Living(ready=True, draining=True))
