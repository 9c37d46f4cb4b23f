"""`Client.resume`: the rest of an answer for somebody who has its beginning."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import cast

import pytest

from shared.bus.base import Bus
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.codec import encode
from shared.errors import DeadlineExceeded, InvalidField, NotKept, Overloaded
from shared.messages import Failed, Finished, ServedBy, Timings, Tokens, Usage
from shared.streams import REQUEST_HEADER
from shared.subjects import Subjects
from tests.fakes import FakeDecode
from trine import resume, stream
from trine.client import Client
from trine.merge import Delta
from trine.stream import Stream

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

TEXT = "one two three four five six seven eight nine ten"
WORDS = [word if not n else f" {word}" for n, word in enumerate(TEXT.split())]
SUBJECTS = Subjects("fake")


@pytest.fixture(autouse=True)
def _not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "KNOWN_S", 0.3)
    monkeypatch.setattr(stream, "LOST_S", 0.3)


@pytest.fixture
async def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def client(broker: MemoryBroker) -> AsyncIterator[Client]:
    async with Client(model="fake", bus=cast(Bus, MemoryBus(broker))) as client:
        yield client


async def read(stream: Stream) -> tuple[list[int], str]:
    """Its tokens and its text; every token comes once and in order."""
    deltas: list[Delta] = [delta async for delta in stream]
    for one, next_ in itertools.pairwise(deltas):
        assert next_.index == one.index + len(one.token_ids)
    return [t for delta in deltas for t in delta.token_ids], "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("index", [0, 1, 9, 10, 12])
async def test_what_has_ended(broker: MemoryBroker, client: Client, index: int) -> None:
    async with FakeDecode(MemoryBus(broker)):
        await client.generate(TEXT, id="r")
        rest = client.resume("r", index)
        assert await read(rest) == (list(range(100 + index, 110)), "".join(WORDS[index:]))
        assert (rest.completion.text, rest.completion.token_ids) == (TEXT, tuple(range(100, 110)))


@pytest.mark.parametrize("index", range(11))
async def test_in_the_middle_of_an_event(broker: MemoryBroker, client: Client, index: int) -> None:
    """As after a restart of the server, when all is written again at once: only a count of characters is exact."""
    async with FakeDecode(MemoryBus(broker), chunks=(4, 1, 5)):
        await client.generate(TEXT, id="r")
        have = "".join(WORDS[:index])
        tokens = list(range(100 + index, 110))
        assert await read(client.resume("r", index, from_text=len(have))) == (tokens, TEXT[len(have) :])
        begun = max(n for n in (0, 4, 5, 10) if n <= index)
        assert await read(client.resume("r", index)) == (tokens, "".join(WORDS[begun:]))


async def test_what_still_runs_and_changes_its_worker(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker), pause=0.05, dies_after=6), Client(model="fake", bus=client._bus) as other:
        lost = client.stream(TEXT, id="r")
        events = aiter(lost)
        have = [(await anext(events)).token_ids[0] for _ in range(3)]
        reading = asyncio.create_task(read(other.resume("r", len(have))))
        await asyncio.sleep(0.2)
        async with FakeDecode(MemoryBus(broker), worker="decode-2", pause=0.01):
            tokens, text = await reading
    assert have + tokens == list(range(100, 110))
    assert text == "".join(WORDS[3:])


async def test_leaving_early_cancels(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker), pause=0.05) as fake:
        lost = aiter(client.stream(TEXT, id="r"))
        await anext(lost)
        async with client.resume("r", 1) as rest:
            await anext(aiter(rest))
        await asyncio.sleep(0.1)
        assert fake.cancelled == {"r"}


async def test_it_ends_as_the_request_did_and_by_its_time(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker), pause=0.2):
        await put(client, 7, Failed(id="f", code="overloaded", message="no"))
        with pytest.raises(Overloaded):
            await read(client.resume("f"))
        lost = aiter(client.stream(TEXT, id="r"))
        await anext(lost)
        with pytest.raises(DeadlineExceeded):
            await read(client.resume("r", 1, timeout=0.3))


async def put(client: Client, request: int, *events: Tokens | Finished | Failed) -> None:
    for event in events:
        subject = SUBJECTS.events(event.id)
        await client._connected().append(subject, encode(event), headers={REQUEST_HEADER: str(request)})


def finished(tokens: int) -> Finished:
    usage = Usage(completion_tokens=tokens)
    return Finished(id="r", reason="stop", seed=1, usage=usage, timings=Timings(), served_by=ServedBy())


class TestNotKept:
    async def test_nothing_is_known(self, broker: MemoryBroker, client: Client) -> None:
        with pytest.raises(NotKept):  # there are no streams either
            await read(client.resume("r"))
        async with FakeDecode(MemoryBus(broker)) as fake:
            with pytest.raises(NotKept):
                await read(client.resume("r", 3))
            assert not fake.cancelled  # it may be in the queue

    async def test_the_beginning_is_gone(self, broker: MemoryBroker, client: Client) -> None:
        async with FakeDecode(MemoryBus(broker)):
            await put(client, 7, Tokens(id="r", index=4, token_ids=[5], text="x"), finished(5))
            with pytest.raises(NotKept):
                await read(client.resume("r", 4))


async def test_of_an_id_that_was_used_twice_the_latest_counts(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker)):
        duplicate = Failed(id="r", code="duplicate_request", message="it is being served")
        await put(client, 7, Tokens(id="r", index=0, token_ids=[1], text="a"), finished(1))
        await put(client, 8, Tokens(id="r", index=0, token_ids=[2, 3], text="bc"))
        await put(client, 9, duplicate)
        await put(client, 8, finished(2))
        await put(client, 9, duplicate)
        assert await read(client.resume("r")) == ([2, 3], "bc")


async def test_what_cannot_be_asked_for(client: Client) -> None:
    for field, call in {
        "request_id": lambda: client.resume(""),
        "from_index": lambda: client.resume("r", -1),
        "model": lambda: client.resume("r", model="m" * 200),
    }.items():
        with pytest.raises(InvalidField) as caught:
            call()
        assert caught.value.field == field
