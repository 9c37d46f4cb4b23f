"""The client against a fake worker: streaming, loss, worker crashes, refusals, deadlines, cancelling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from shared.bus.base import Bus, Incoming
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.codec import decode_event, encode
from shared.config import Settings
from shared.errors import (
    BusDisconnected,
    DeadlineExceeded,
    InvalidField,
    Overloaded,
    TooLarge,
    TrineError,
    Unavailable,
    UnknownModel,
)
from shared.messages import Failed, Finished, Generate, ServedBy, Timings, Tokens, Usage
from shared.subjects import Subjects
from tests.fakes import FakeDecode, LossyBus
from trine.client import Client
from trine.stream import FAILOVER_S
from trine.submit import prepare

pytestmark = pytest.mark.anyio

TEXT = "the quick brown fox jumps over the lazy dog and then sleeps"


@pytest.fixture
async def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def client(broker: MemoryBroker) -> AsyncIterator[Client]:
    async with Client(model="fake", bus=MemoryBus(broker)) as client:
        yield client


def lossy(broker: MemoryBroker, lose: Callable[[Incoming], bool]) -> Client:
    bus: Any = LossyBus(MemoryBus(broker), lose)
    return Client(model="fake", bus=bus)


async def finishes(condition: Callable[[], bool], timeout: float = 3.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_generate_gives_everything_about_the_answer(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker), chunks=(1, 3)) as fake:
        completion = await client.generate(TEXT, seed=7, temperature=0.5)
    assert completion.text == TEXT
    assert completion.token_ids == tuple(range(100, 100 + 12))
    assert (completion.finish_reason, completion.seed, completion.attempts) == ("stop", 7, 1)
    assert completion.usage.completion_tokens == 12
    assert completion.served_by.decode == "decode-1"
    assert completion.timings.total_ms >= completion.timings.ttft_ms > 0
    assert fake.requests[0].model == "fake"
    assert fake.requests[0].temperature == 0.5
    assert set(completion.as_dict()) >= {
        "id",
        "model",
        "text",
        "finish_reason",
        "seed",
        "usage",
        "timings",
        "served_by",
    }


async def test_timings_are_the_clients_own(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker), pause=0.05):
        completion = await client.generate("a b c d")
    assert completion.timings.tpot_ms == pytest.approx(50, rel=0.5)
    assert completion.timings.ttft_ms < 50


async def test_chat_messages_and_token_ids_are_sent_as_they_are(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker)) as fake:
        await client.generate(messages=[{"role": "user", "content": "hello there"}])
        await client.generate(token_ids=(1, 2, 3), stop=["x"], max_tokens=1)
    assert fake.requests[0].messages is not None
    assert fake.requests[0].messages[0].content == "hello there"
    assert (fake.requests[1].token_ids, fake.requests[1].stops) == ([1, 2, 3], ("x",))


async def test_a_stream_yields_deltas_and_then_has_the_completion(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker), chunks=(2,)):
        stream = client.stream(TEXT)
        with pytest.raises(Unavailable):
            _ = stream.completion
        deltas = [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas) == TEXT == stream.completion.text
    assert [delta.index for delta in deltas] == [0, 2, 4, 6, 8, 10]
    with pytest.raises(RuntimeError, match="once"):
        stream.__aiter__()


async def test_many_requests_at_once_do_not_mix(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker), chunks=(1, 2)):
        texts = [f"request number {i} says {i * i}" for i in range(32)]
        answers = await asyncio.gather(*(client.generate(text) for text in texts))
    assert [answer.text for answer in answers] == texts


# Events that get lost on the way


async def test_a_lost_event_is_fetched_from_the_event_stream_while_others_flow(broker: MemoryBroker) -> None:
    def third(message: Incoming) -> bool:
        event = decode_event(message.data)
        return isinstance(event, Tokens) and event.index == 2

    async with FakeDecode(MemoryBus(broker), pause=0.03), lossy(broker, third) as client:
        seen: list[float] = []
        stream = client.stream(TEXT)
        async for _ in stream:
            seen.append(time.monotonic())
    assert stream.completion.text == TEXT
    assert len(seen) > 6, "the gap was filled long before the end"


async def test_an_end_that_got_lost_is_found_after_a_silence(broker: MemoryBroker) -> None:
    def end(message: Incoming) -> bool:
        return isinstance(decode_event(message.data), Finished)

    async with FakeDecode(MemoryBus(broker)), lossy(broker, end) as client:
        started = time.monotonic()
        completion = await client.generate(TEXT)
    assert completion.text == TEXT
    assert time.monotonic() - started < 3.5


async def test_nothing_heard_live_at_all(broker: MemoryBroker) -> None:
    async with FakeDecode(MemoryBus(broker)), lossy(broker, lambda _: True) as client:
        assert (await client.generate(TEXT)).text == TEXT


async def test_a_reader_slower_than_the_worker_loses_nothing(
    broker: MemoryBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trine.stream.MAX_QUEUED", 3)
    async with FakeDecode(MemoryBus(broker)):
        stream = client.stream(TEXT)
        text = ""
        async for delta in stream:
            text += delta.text
            await asyncio.sleep(0.02)
    assert text == TEXT == stream.completion.text


async def test_events_missed_while_disconnected_are_fetched(broker: MemoryBroker) -> None:
    bus = MemoryBus(broker)
    async with FakeDecode(MemoryBus(broker), pause=0.03), Client(model="fake", bus=bus) as client:
        stream = client.stream(TEXT)
        text = ""
        started = time.monotonic()
        async for delta in stream:
            text += delta.text
            if delta.index == 2:
                bus.disconnect()
                asyncio.get_running_loop().call_later(0.15, bus.reconnect)
    assert text == TEXT
    assert time.monotonic() - started < 1.5, "the reconnect, not the silence, made it look"


async def test_garbage_and_events_of_others_are_ignored(broker: MemoryBroker, client: Client) -> None:
    noise = MemoryBus(broker)
    async with FakeDecode(MemoryBus(broker), pause=0.02):
        stream = client.stream(TEXT)
        subject = Subjects("fake").events(stream.id)
        text = ""
        async for delta in stream:
            text += delta.text
            foreign = Tokens(id="another", index=delta.index + 1, token_ids=[1], text="WRONG")
            for data in (b"", b"\xff\xff", b'{"type":"tokens"}', encode(foreign)):
                await noise.publish(subject, data)
    assert text == TEXT


async def test_noise_does_not_keep_it_from_looking(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trine.stream.QUIET_S", 0.2)
    noise = MemoryBus(broker)

    async def chatter(subject: str) -> None:
        while True:
            await noise.publish(subject, b"noise")
            await asyncio.sleep(0.02)

    async with FakeDecode(MemoryBus(broker)), lossy(broker, lambda message: message.data != b"noise") as client:
        stream = client.stream(TEXT, deadline_ms=2000)
        talking = asyncio.create_task(chatter(Subjects("fake").events(stream.id)))
        async for _ in stream:
            pass
        talking.cancel()
    assert stream.completion.text == TEXT


async def test_an_event_stream_that_was_made_anew_is_read_from_its_beginning(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences start again at 1 then, below what has been read of the old one."""
    monkeypatch.setattr("trine.stream.QUIET_S", 0.05)
    fake, writer = FakeDecode(MemoryBus(broker)), MemoryBus(broker)
    await fake.ensure_streams()
    subjects = Subjects("fake")
    for i in range(20):
        await writer.append(subjects.events(f"other-{i}"), b"x")
    async with lossy(broker, lambda _: True) as client:
        running = asyncio.create_task(client.generate(TEXT, id="r1", deadline_ms=3000))
        await asyncio.sleep(0.05)
        await writer.append(subjects.events("r1"), encode(Tokens(id="r1", index=0, token_ids=[1], text="a")))
        await asyncio.sleep(0.5)  # it has looked
        broker.disconnect()
        broker.wipe_memory_streams()
        broker.reconnect()
        await fake.ensure_streams()
        await writer.append(subjects.events("r1"), encode(Tokens(id="r1", index=1, token_ids=[2], text="b")))
        end = Finished(
            id="r1", reason="stop", seed=1, usage=Usage(completion_tokens=2), timings=Timings(), served_by=ServedBy()
        )
        await writer.append(subjects.events("r1"), encode(end))
        assert (await running).text == "ab"


# Workers that die


async def test_another_worker_goes_on_where_one_died(broker: MemoryBroker, client: Client) -> None:
    first = FakeDecode(MemoryBus(broker), worker="decode-1", dies_after=5)
    async with first:
        running = asyncio.create_task(client.generate(TEXT))
        await first.dead.wait()
        async with FakeDecode(MemoryBus(broker), worker="decode-2", chunks=(3,)):
            completion = await running
    assert completion.text == TEXT
    assert completion.usage.completion_tokens == 12
    assert (completion.served_by.decode, completion.attempts) == ("decode-2", 2)


async def test_no_worker_left_ends_at_the_deadline_and_not_later(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker), dies_after=5):
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.generate(TEXT, deadline_ms=700)
    assert 0.6 < time.monotonic() - started < 1.2


async def test_a_bus_that_stays_away_ends_at_the_deadline(broker: MemoryBroker) -> None:
    bus = MemoryBus(broker)
    async with FakeDecode(MemoryBus(broker), pause=0.02), Client(model="fake", bus=bus) as client:
        running = asyncio.create_task(client.generate(TEXT, deadline_ms=600))
        await asyncio.sleep(0.1)
        bus.disconnect()
        with pytest.raises(DeadlineExceeded, match="NATS is not reachable"):
            await running


async def test_lost_for_good_is_an_error_and_not_a_shorter_text(
    broker: MemoryBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trine.stream.LOST_S", 0.2)
    async with FakeDecode(MemoryBus(broker)) as fake:
        fake._answer = lambda _: []
        stream = client.stream(TEXT, id="r1")
        end = Finished(
            id="r1", reason="stop", seed=1, usage=Usage(completion_tokens=3), timings=Timings(), served_by=ServedBy()
        )
        bus = MemoryBus(broker)

        async def on_request(_: Incoming) -> None:
            await bus.publish(Subjects("fake").events("r1"), encode(end))

        fake.stop()
        await bus.subscribe(Subjects("fake").requests[0], on_request)
        with pytest.raises(Unavailable, match="lost"):
            async for _ in stream:
                pass


# Refusals


async def test_a_worker_that_fails_a_request_raises_its_error(broker: MemoryBroker, client: Client) -> None:
    bus = MemoryBus(broker)

    async def refuse(message: Incoming) -> None:
        failed = Failed(id="r1", code="context_length_exceeded", message="too long", field="prompt")
        await bus.publish(Subjects("fake").events("r1"), encode(failed))

    async with FakeDecode(MemoryBus(broker)) as fake:
        fake.stop()
        await bus.subscribe(Subjects("fake").requests[0], refuse)
        with pytest.raises(TrineError, match="too long") as caught:
            await client.generate(TEXT, id="r1")
    assert (caught.value.code, caught.value.field) == ("context_length_exceeded", "prompt")
    assert type(caught.value).__name__ == "ContextLengthExceeded"


async def test_a_full_queue_is_overloaded_at_once(broker: MemoryBroker, client: Client) -> None:
    fake = FakeDecode(MemoryBus(broker), settings=Settings(max_queued=2))
    await fake.ensure_streams()  # nobody takes anything
    waiting = [asyncio.create_task(client.generate(TEXT, deadline_ms=2000)) for _ in range(2)]
    await asyncio.sleep(0.05)
    started = time.monotonic()
    with pytest.raises(Overloaded):
        await client.generate(TEXT)
    assert time.monotonic() - started < 0.5
    for task in waiting:
        task.cancel()


async def test_an_unknown_model_names_those_that_are_served(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker)):
        started = time.monotonic()
        with pytest.raises(UnknownModel, match=r"'nope'.*running: fake") as caught:
            await client.generate(TEXT, model="nope")
        assert time.monotonic() - started < 2.0
        assert caught.value.field == "model"
        assert await client.models(0.3) == ["fake"]


async def test_nobody_serves_anything_says_how_to_start(client: Client) -> None:
    with pytest.raises(UnknownModel, match="trine up"):
        await client.generate(TEXT)


async def test_too_big_is_refused_before_it_is_sent(broker: MemoryBroker) -> None:
    bus = MemoryBus(broker, max_payload=2000)
    async with Client(model="fake", bus=bus) as client:
        with pytest.raises(TooLarge):
            await client.generate("x" * 3000)
    async with Client(model="fake", bus=MemoryBus(broker)) as client:
        with pytest.raises(TooLarge, match=str(Generate.max_bytes)):
            client.stream("x" * (Generate.max_bytes + 1))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": "a", "temperature": -1.0}, "temperature"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "a", "colour": "blue"}, "colour"),
        ({"prompt": "a", "priority": "urgent"}, "priority"),
        ({"prompt": "a", "id": ""}, "id"),
        ({"prompt": "a", "model": "m" * 129}, "model"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ({"prompt": "\ud800"}, None),
        ({"prompt": "a", "token_ids": [1]}, None),
    ],
)
async def test_a_request_that_cannot_be_sent_names_the_field(
    client: Client, arguments: dict[str, Any], field: str | None
) -> None:
    with pytest.raises(InvalidField) as caught:
        client.stream(**arguments)
    assert caught.value.field == field


async def test_nobody_can_guess_by_what_the_queue_knows_a_repeat() -> None:
    """One queue serves all tenants: with another's message id one could have that one's request thrown away."""
    asks = [prepare("fake", tenant, "normal", "mine", {"prompt": TEXT}, 1 << 20) for tenant in ("a", "a", "b")]
    assert len({ask.message_id for ask in asks}) == 3
    assert not any("mine" in ask.message_id for ask in asks)


async def test_an_id_used_again_later_does_not_get_the_old_answer(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker)), lossy(broker, lambda _: True) as deaf:
        assert (await client.generate(TEXT, id="mine")).text == TEXT
        assert (await deaf.generate("something else", id="mine")).text == "something else"


async def test_a_lost_ack_is_retried_without_asking_twice(broker: MemoryBroker) -> None:
    class LostAck(MemoryBus):
        tries = 0

        async def append(self, *args: Any, **kwargs: Any) -> int:
            self.tries += 1
            seq = await super().append(*args, **kwargs)
            if self.tries == 1:
                raise BusDisconnected("no ack")
            return seq

    bus = LostAck(broker)
    async with FakeDecode(MemoryBus(broker)) as fake, Client(model="fake", bus=bus) as client:
        assert (await client.generate(TEXT)).text == TEXT
    assert (bus.tries, len(fake.requests)) == (2, 1)


async def test_without_a_connection_it_says_so_soon(broker: MemoryBroker) -> None:
    bus = MemoryBus(broker)
    async with Client(model="fake", bus=bus) as client:
        bus.disconnect()
        started = time.monotonic()
        with pytest.raises(BusDisconnected):
            await client.generate(TEXT)
        assert time.monotonic() - started < 2 * FAILOVER_S
    with pytest.raises(BusDisconnected, match="async with"):
        client.stream(TEXT)


# Cancelling


async def test_cancel_ends_the_answer_with_what_there_is(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker), pause=0.02):
        stream = client.stream(TEXT)
        async for delta in stream:
            if delta.index == 2:
                await client.cancel(stream.id)
    assert stream.completion.finish_reason == "cancelled"
    assert TEXT.startswith(stream.completion.text)


async def test_leaving_the_loop_cancels(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker), pause=0.02) as fake:
        stream = client.stream(TEXT)
        async for _ in stream:
            break
        await finishes(lambda: fake.cancelled == {stream.id})


async def test_leaving_the_block_cancels(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker), pause=0.02) as fake:
        stream = client.stream(TEXT)
        iterator = stream.__aiter__()  # kept, so that no garbage collection helps
        async with stream:
            await iterator.__anext__()
        await finishes(lambda: fake.cancelled == {stream.id})


async def test_a_cancelled_task_and_a_closed_client_cancel(broker: MemoryBroker) -> None:
    async with FakeDecode(MemoryBus(broker), pause=0.02) as fake:
        client = Client(model="fake", bus=MemoryBus(broker))
        async with client:
            task = asyncio.create_task(client.generate(TEXT, id="task"))
            await finishes(lambda: bool(fake.requests))
            task.cancel()
            await finishes(lambda: fake.cancelled == {"task"})
            iterator = client.stream(TEXT, id="closed").__aiter__()
            await iterator.__anext__()
        await finishes(lambda: fake.cancelled == {"task", "closed"})


async def test_a_finished_answer_is_not_cancelled(broker: MemoryBroker, client: Client) -> None:
    async with FakeDecode(MemoryBus(broker)) as fake:
        async with client.stream(TEXT) as stream:
            async for _ in stream:
                pass
        await asyncio.sleep(0.05)
        assert not fake.cancelled


def test_importing_trine_is_cheap() -> None:
    import subprocess
    import sys

    code = "import sys, trine; assert not {'nats', 'pydantic', 'torch'} & set(sys.modules); trine.Client"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


_: type[Bus] = MemoryBus  # a MemoryBus is what the client is written against
