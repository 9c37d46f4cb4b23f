"""The process that compiles forms: what it takes too much for, what it does not survive, what is kept of its work."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from shared.errors import InvalidField, Unavailable
from shared.messages import Guided
from shared.sampling.grammar_link import Died
from shared.sampling.grammars import Grammars
from shared.sampling.guide import Guide
from tests import tiny_models
from tests.letters import EOS, TABLE, ids

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120)]

PERSON = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
MANY: dict[str, Any] = {
    "json_schema": {
        "type": "object",
        "properties": {f"p{n}": {"type": "string"} for n in range(400)},
        "minProperties": 100,
        "maxProperties": 150,
    }
}
"""The compiler needs longer for it than anybody waits."""
LATE = {"grammar": 'root ::= [a-y] [a-y] | "z" (("a"{0,1000}){0,1000}){0,1000}'}
"""Soon compiled, and easy to follow, but for one letter: what comes after that costs more with each token."""


async def made(grammars: Grammars, **form: Any) -> Guide:
    return await grammars.guide(Guided(**form), banned=(), min_tokens=0)


async def take(guide: Guide, text: str) -> int:
    return await asyncio.to_thread(guide.take, ids(text))


async def refused(grammars: Grammars, **form: Any) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        await made(grammars, **form)
    assert caught.value.field == f"guided.{next(iter(form))}"
    return caught.value


async def longest_pause(until: asyncio.Event) -> float:
    """How long the event loop did nothing else, at most."""
    longest, last = 0.0, time.monotonic()
    while not until.is_set():
        await asyncio.sleep(0.005)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest


async def test_hostile_forms_cost_who_compiles_and_follows_and_nobody_else() -> None:
    grammars = Grammars(TABLE, tiny_models.VOCAB, {EOS}, cpu_s=1.0)
    done = asyncio.Event()
    watch = asyncio.create_task(longest_pause(done))
    try:
        guide = await made(grammars, json_schema=PERSON)
        first = grammars.process_id
        assert await take(guide, '{"n"') == 4
        assert "too much" in (await refused(grammars, **MANY)).message
        started = time.monotonic()
        assert "too much" in (await refused(grammars, **MANY)).message
        assert time.monotonic() - started < 1.0  # it was not tried again
        assert "nothing" in (await refused(grammars, json_schema={"type": "nothing"})).message
        assert guide.masks(ids(":1}")).shape == (4, tiny_models.VOCAB // 32)

        late = await made(grammars, **LATE)
        assert len(late.masks(ids("ab"))) == 3
        with pytest.raises(InvalidField, match="too much"):
            await asyncio.to_thread(late.masks, ids("z" + "a" * 64))
        assert await take(guide, ":1") == 2  # it was forgotten there, and made again
        assert grammars.process_id == first is not None

        for name in (signal.SIGINT, signal.SIGTERM):  # as the terminal or systemd sends them to the worker too
            os.kill(first, name)
        assert await take(await made(grammars, choice=["c"]), "c") == 1
        assert grammars.process_id == first

        os.kill(first, signal.SIGKILL)
        both = await asyncio.gather(*(made(grammars, choice=["a", "b"]) for _ in range(2)))
        assert [await take(one, "a") for one in both] == [1, 1] and both[0].ended
        assert await take(guide, "}") == 1 and guide.ended
        assert await take(await made(grammars, json_schema=PERSON), '{"n"') == 4  # kept from the first time
        done.set()
        assert await watch < 1.5
    finally:
        done.set()
        await grammars.close()
    assert grammars.process_id is None


async def test_pipes_that_make_no_sense_any_more_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(TABLE, tiny_models.VOCAB, {EOS})
    try:
        guide = await made(grammars, choice=["ab"])
        assert await take(guide, "a") == 1
        following = grammars._links.following().following
        with monkeypatch.context() as patched:
            patched.setattr("shared.sampling.grammar_link.packed", lambda _: bytes(1 << 20))
            with pytest.raises(Died):
                await asyncio.to_thread(following.ask)
        with pytest.raises(Unavailable):
            await take(guide, "b")
        assert await take(await made(grammars, choice=["ab"]), "ab") == 2  # known, and followed by another one
        assert await take(guide, "b") == 1 and guide.ended
    finally:
        await grammars.close()
