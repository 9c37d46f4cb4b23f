"""A request's event stream: whatever happens to the bus, it is gapless, has one end, and one writer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from services.decode import events
from services.decode.events import MAX_EVENT_LOGPROBS, MAX_EVENT_TOKENS, EventWriter, History, Outcome, read_history
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.codec import Format, decode_event, encode
from shared.errors import BusDisconnected
from shared.messages import Failed, Finished, ServedBy, Timings, Tokens, Usage
from shared.sampling.fields import Logprob
from shared.streams import REQUEST_HEADER, event_stream
from shared.subjects import Subjects

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

SUBJECTS = Subjects("m")
SUBJECT = SUBJECTS.events("r")
MINE, OTHER = 7, 8


class LossyBus(MemoryBus):
    """Loses the acks of appends: they are stored, and the writer is told otherwise."""

    lost_acks = 0

    async def append(
        self,
        subject: str,
        data: bytes | Sequence[bytes | memoryview],
        *,
        headers: Mapping[str, str] | None = None,
        expect_last: int | None = None,
        message_id: str | None = None,
        timeout: float = 5.0,
    ) -> int:
        seq = await super().append(subject, data, headers=headers, expect_last=expect_last, message_id=message_id)
        if self.lost_acks:
            self.lost_acks -= 1
            raise BusDisconnected("no ack")
        return seq


class Desk:
    """The event stream, and writers to it."""

    def __init__(self) -> None:
        self.bus = LossyBus(MemoryBroker())
        self.ensured = 0

    async def ensure(self) -> None:
        self.ensured += 1
        await self.bus.ensure_stream(event_stream(SUBJECTS))

    async def history(self, request: int = MINE) -> History:
        return await read_history(self.bus, SUBJECTS.event_stream, SUBJECTS.events("r"), request)

    def writer(self, attempt: int = 1, history: History | None = None, request: int = MINE) -> EventWriter:
        return EventWriter(
            self.bus,
            SUBJECTS.event_stream,
            SUBJECTS.events("r"),
            "r",
            request,
            attempt=attempt,
            format=Format.MSGPACK,
            history=history or History(),
            ensure_streams=self.ensure,
        )

    async def put(self, event: Tokens | Finished | Failed, request: int = MINE) -> None:
        await self.bus.append(SUBJECT, encode(event), headers={REQUEST_HEADER: str(request)})

    async def stored(self, request: int = MINE) -> list[Any]:
        found = await self.bus.read(SUBJECTS.event_stream, SUBJECT)
        return [decode_event(m.data) for m in found if m.headers[REQUEST_HEADER] == str(request)]

    async def wipe(self) -> None:
        self.bus.broker.wipe_memory_streams()
        await self.ensure()


@pytest.fixture
async def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(events, "RETRY_S", 0.01)
    desk = Desk()
    await desk.ensure()
    return desk


def push(writer: EventWriter, first: int, count: int) -> None:
    for token in range(first, first + count):
        writer.push(token, f"{token} ")


def finished(count: int, attempt: int = 1) -> Finished:
    usage = Usage(completion_tokens=count)
    return Finished(
        id="r", attempt=attempt, reason="length", seed=1, usage=usage, timings=Timings(), served_by=ServedBy()
    )


def tokens(index: int, *ids: int, attempt: int = 1) -> Tokens:
    return Tokens(id="r", attempt=attempt, index=index, token_ids=list(ids), text="".join(f"{t} " for t in ids))


async def wait(task: asyncio.Task[Outcome]) -> Outcome:
    return await asyncio.wait_for(task, 5)


async def until_stored(desk: Desk, count: int, request: int = MINE) -> None:
    async with asyncio.timeout(5):
        while len((await desk.history(request)).tokens) < count:
            await asyncio.sleep(0.005)


def check_gapless(stored: list[Any], count: int) -> None:
    """Tokens 0 to `count` in order, each once, with their text, and one end, which is last."""
    assert [t for e in stored[:-1] for t in e.token_ids] == list(range(count))
    assert "".join(e.text for e in stored[:-1]) == "".join(f"{t} " for t in range(count))
    starts = [e.index for e in stored[:-1]]
    assert starts == [sum(len(e.token_ids) for e in stored[:n]) for n in range(len(starts))]
    assert isinstance(stored[-1], Finished)
    assert stored[-1].usage.completion_tokens == count
    assert not any(isinstance(e, Finished | Failed) for e in stored[:-1])


async def test_tokens_in_order_then_one_end(desk: Desk) -> None:
    writer = desk.writer()
    task = asyncio.create_task(writer.run())
    push(writer, 0, 3)
    await until_stored(desk, 3)
    push(writer, 3, 2)
    writer.end(finished(5))
    writer.end(finished(99))
    assert await wait(task) is Outcome.ENDED
    check_gapless(await desk.stored(), 5)


def logprob(token: int) -> Logprob:
    return Logprob(logprob=-token / 1000, top_ids=[token], top_logprobs=[-token / 1000])


@pytest.mark.parametrize("wiped", [False, True])
async def test_logprobs_go_on_where_an_earlier_attempt_ended(desk: Desk, wiped: bool) -> None:
    """One for each token, also when what the earlier attempt wrote has to be written again."""
    first, half, count = desk.writer(), MAX_EVENT_LOGPROBS + 10, 2 * MAX_EVENT_LOGPROBS
    task = asyncio.create_task(first.run())
    for token in range(half):
        first.push(token, f"{token} ", logprob(token))
    await until_stored(desk, half)
    task.cancel()
    history = await desk.history()
    assert history.logprobs == [logprob(token) for token in range(half)]
    if wiped:
        await desk.wipe()
    second = desk.writer(attempt=2, history=history)
    for token in range(half, count):
        second.push(token, f"{token} ", logprob(token))
    second.end(finished(count, attempt=2))
    assert await wait(asyncio.create_task(second.run())) is Outcome.ENDED
    stored = await desk.stored()
    check_gapless(stored, count)
    assert [p for e in stored[:-1] for p in e.logprobs] == [logprob(token) for token in range(count)]


async def test_a_forged_event_without_logprobs_costs_those_of_its_neighbours_at_most(desk: Desk) -> None:
    await desk.put(tokens(0, 0, 1))
    writer = desk.writer(attempt=2, history=await desk.history())
    await desk.wipe()
    for token in (2, 3):
        writer.push(token, f"{token} ", logprob(token))
    writer.end(finished(4, attempt=2))
    assert await wait(asyncio.create_task(writer.run())) is Outcome.ENDED
    check_gapless(await desk.stored(), 4)


async def test_a_lost_ack_repeats_nothing(desk: Desk) -> None:
    writer = desk.writer()
    task = asyncio.create_task(writer.run())
    desk.bus.lost_acks = 1
    push(writer, 0, 3)
    await until_stored(desk, 3)
    push(writer, 3, 2)
    desk.bus.lost_acks = 1
    await until_stored(desk, 5)
    desk.bus.lost_acks = 1
    writer.end(finished(5))
    assert await wait(task) is Outcome.ENDED
    check_gapless(await desk.stored(), 5)


async def test_held_back_text_is_shown_once_before_the_end_though_its_ack_is_lost(desk: Desk) -> None:
    writer = desk.writer()
    task = asyncio.create_task(writer.run())
    push(writer, 0, 2)
    await until_stored(desk, 2)
    desk.bus.lost_acks = 1
    writer.end(finished(2), tail="tail")
    assert await wait(task) is Outcome.ENDED
    stored = await desk.stored()
    assert [e.text for e in stored[:-1] if not e.token_ids] == ["tail"]
    assert isinstance(stored[-1], Finished)


async def test_held_back_text_survives_a_wipe_before_the_end(desk: Desk) -> None:
    writer = desk.writer()
    push(writer, 0, 2)
    writer.end(finished(2), tail="tail")
    append = desk.bus.append

    async def wipe_after_tail(*args: Any, **options: Any) -> int:
        seq = await append(*args, **options)
        if (event := decode_event(args[1])) and isinstance(event, Tokens) and not event.token_ids and desk.ensured < 2:
            await desk.wipe()
        return seq

    desk.bus.append = wipe_after_tail  # type: ignore[method-assign]
    assert await wait(asyncio.create_task(writer.run())) is Outcome.ENDED
    assert "".join(e.text for e in (await desk.stored())[:-1]) == "0 1 tail"


async def test_a_wiped_stream_is_written_again_in_events_of_bounded_size(desk: Desk) -> None:
    writer = desk.writer()
    task = asyncio.create_task(writer.run())
    count = 2 * MAX_EVENT_TOKENS + 10
    push(writer, 0, count)
    await until_stored(desk, count)
    await desk.wipe()
    push(writer, count, 5)
    writer.end(finished(count + 5))
    assert await wait(task) is Outcome.ENDED
    stored = await desk.stored()
    check_gapless(stored, count + 5)
    assert max(len(e.token_ids) for e in stored[:-1]) == MAX_EVENT_TOKENS


async def test_a_missing_stream_is_created_again(desk: Desk) -> None:
    writer = desk.writer()
    task = asyncio.create_task(writer.run())
    push(writer, 0, 3)
    await until_stored(desk, 3)
    del desk.bus.broker.streams[SUBJECTS.event_stream]
    push(writer, 3, 1)
    writer.end(finished(4))
    assert await wait(task) is Outcome.ENDED
    assert desk.ensured == 2
    check_gapless(await desk.stored(), 4)


async def test_an_outage_is_waited_out_and_one_without_end_is_given_up(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = desk.writer()
    task = asyncio.create_task(writer.run())
    desk.bus.disconnect()
    push(writer, 0, 3)
    await asyncio.sleep(0.05)
    desk.bus.reconnect()
    await until_stored(desk, 3)
    monkeypatch.setattr(events, "GIVE_UP_S", 0.05)
    desk.bus.disconnect()
    push(writer, 3, 1)
    assert await wait(task) is Outcome.GIVEN_UP


async def test_short_outages_do_not_add_up_to_giving_up(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "GIVE_UP_S", 0.1)
    writer = desk.writer()
    task = asyncio.create_task(writer.run())
    for number in range(4):
        desk.bus.disconnect()
        push(writer, number, 1)
        await asyncio.sleep(0.04)
        desk.bus.reconnect()
        await until_stored(desk, number + 1)
    writer.end(finished(4))
    assert await wait(task) is Outcome.ENDED


async def test_two_attempts_share_one_stream_without_gap_or_second_end(desk: Desk) -> None:
    first, second = desk.writer(1), desk.writer(2)
    tasks = [asyncio.create_task(w.run()) for w in (first, second)]
    push(first, 0, 4)
    await until_stored(desk, 4)
    push(second, 0, 2)  # still behind what is stored
    await asyncio.sleep(0.02)
    push(second, 2, 6)
    await until_stored(desk, 8)
    push(first, 4, 6)
    assert await wait(tasks[0]) is Outcome.FENCED
    second.end(finished(8, attempt=2))
    assert await wait(tasks[1]) is Outcome.ENDED
    check_gapless(await desk.stored(), 8)


async def test_an_end_by_another_attempt_is_the_end(desk: Desk) -> None:
    first, second = desk.writer(1), desk.writer(2)
    tasks = [asyncio.create_task(w.run()) for w in (first, second)]
    push(first, 0, 4)
    first.end(finished(4))
    assert await wait(tasks[0]) is Outcome.ENDED
    push(second, 0, 6)
    second.end(finished(6, attempt=2))
    assert await wait(tasks[1]) is Outcome.ENDED
    check_gapless(await desk.stored(), 4)


async def test_a_later_attempt_goes_on_where_the_first_one_stopped(desk: Desk) -> None:
    first = desk.writer()
    first.cached_tokens = 12
    task = asyncio.create_task(first.run())
    push(first, 0, 4)
    await until_stored(desk, 4)
    task.cancel()
    history = await desk.history()
    assert (history.tokens, history.attempt, history.cached_tokens) == ([0, 1, 2, 3], 1, 12)
    assert not history.ended
    second = desk.writer(2, history)
    second.cached_tokens = 99
    push(second, 4, 2)
    second.end(finished(6, attempt=2))
    assert await wait(asyncio.create_task(second.run())) is Outcome.ENDED
    check_gapless(await desk.stored(), 6)
    after = await desk.history()
    assert after.ended
    assert after.cached_tokens == 12


class TestOneIdTwice:
    async def test_the_second_request_is_a_duplicate_and_the_first_goes_on(self, desk: Desk) -> None:
        first, second = desk.writer(), desk.writer(request=OTHER)
        tasks = [asyncio.create_task(w.run()) for w in (first, second)]
        push(first, 0, 3)
        await until_stored(desk, 3)
        push(second, 50, 3)
        assert await wait(tasks[1]) is Outcome.DUPLICATE
        await desk.put(Failed(id="r", code="duplicate_request", message="in use"), OTHER)
        push(first, 3, 3)
        first.end(finished(6))
        assert await wait(tasks[0]) is Outcome.ENDED
        check_gapless(await desk.stored(), 6)

    async def test_an_id_whose_request_has_ended_is_free(self, desk: Desk) -> None:
        await desk.put(tokens(0, 5), OTHER)
        await desk.put(finished(1), OTHER)
        assert not (await desk.history()).foreign
        writer = desk.writer()
        push(writer, 0, 3)
        writer.end(finished(3))
        assert await wait(asyncio.create_task(writer.run())) is Outcome.ENDED
        check_gapless(await desk.stored(), 3)

    async def test_a_refusal_of_another_request_does_not_free_the_id(self, desk: Desk) -> None:
        await desk.put(tokens(0, 5), OTHER)
        await desk.put(Failed(id="r", code="duplicate_request", message="in use"), 9)
        assert (await desk.history()).foreign
        assert not (await desk.history(OTHER)).foreign

    async def test_whoever_wrote_first_keeps_it(self, desk: Desk) -> None:
        await desk.put(tokens(0, 5))
        await desk.put(tokens(0, 6), OTHER)
        assert not (await desk.history()).foreign
        assert (await desk.history(OTHER)).foreign


async def test_what_is_no_event_is_passed_over(desk: Desk) -> None:
    await desk.bus.append(SUBJECT, b"garbage", headers={REQUEST_HEADER: str(MINE)})
    await desk.put(tokens(0, 1, 2))
    await desk.put(tokens(7, 9))  # a gap
    await desk.bus.append(SUBJECT, encode(tokens(2, 3)), headers={REQUEST_HEADER: str(MINE), "Trine-Cached": "-1x"})
    history = await desk.history()
    assert history.tokens == [1, 2, 3]
    assert history.cached_tokens is None
    assert history.last_seq == 4
