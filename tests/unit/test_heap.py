"""What full collections leave out."""

from __future__ import annotations

import gc
from typing import cast

import pytest

from shared.actor import Actor
from shared.config import Settings
from shared.worker import Connect, _live


class Serving:
    """An actor that tells, once it serves, whether what it has loaded is still looked through."""

    def __init__(self) -> None:
        self.weights = [[number] for number in range(1000)]
        self.looked_through: bool | None = None

    async def run(self) -> None:
        here = {id(kept) for kept in gc.get_objects()}
        self.looked_through = any(id(weight) in here for weight in self.weights)


@pytest.mark.anyio
async def test_what_a_worker_has_loaded_is_not_looked_through_while_it_serves() -> None:
    actor = Serving()

    async def make(settings: Settings, worker: str, connect: Connect) -> Actor:
        return cast("Actor", actor)

    await _live("decode", Settings(), "decode-1", make)
    assert actor.looked_through is False
