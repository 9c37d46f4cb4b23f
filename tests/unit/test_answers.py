"""What has come of several streams is handed out together, in order, and errors after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from services.gateway.answers import Answers
from shared.errors import Overloaded, TrineError
from trine.merge import Delta
from trine.stream import Stream

pytestmark = pytest.mark.anyio


class Scripted:
    """A stream of single tokens, that ends with an error, or never."""

    id = "a1"

    def __init__(self, tokens: int, error: TrineError | None) -> None:
        self._tokens, self._error = tokens, error

    async def __aenter__(self) -> Scripted:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for index in range(self._tokens):
            yield Delta("x", (7,), index)
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()


def answers(*streams: Scripted) -> Answers:
    return Answers(cast("list[Stream]", streams), lambda idle: None)


async def test_what_came_before_an_error_is_handed_out_before_it() -> None:
    async with answers(Scripted(5, Overloaded("full"))) as found:
        await asyncio.sleep(0.01)
        items = await found.next(1.0)
        assert [(choice, item.index) for choice, item in items if isinstance(item, Delta)] == [(0, i) for i in range(5)]
        for _ in range(2):  # it stays
            with pytest.raises(Overloaded):
                await asyncio.wait_for(found.next(60.0), 1.0)


async def test_more_than_may_wait_comes_whole_and_in_order() -> None:
    async with answers(Scripted(150, None), Scripted(150, None)) as found:
        came: list[tuple[int, int]] = []
        while len(came) < 300:
            came += [(choice, item.index) for choice, item in await found.next(1.0) if isinstance(item, Delta)]
        assert [[i for c, i in came if c == choice] for choice in (0, 1)] == [list(range(150))] * 2
        assert await found.next(0.02) == []
