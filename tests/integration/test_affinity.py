"""A request goes to the decode worker whose pool holds its prefix, and never waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, cast

import pytest

from services.decode.intake import MAX_TAKING
from shared.bus.base import Incoming, Job
from shared.codec import decode, encode
from shared.messages import Handover, HandoverReply
from shared.subjects import Subjects
from shared.tokenizer import Tokenizer
from tests.fake_engine import FakeEngine, FakeTokenizer, completion
from tests.fleet_rig import MODEL, FleetRig

PREFIX = list(range(100, 500))
HOLDER, OTHER = "decode-1", "decode-2"
pytestmark = pytest.mark.anyio


def question(number: int) -> list[int]:
    return [*PREFIX, 500 + number, 600 + number]


async def two_workers(rig: FleetRig, holder: dict[str, Any] | None = None, **overrides: Any) -> None:
    """One whose pool holds PREFIX, and one whose pool is empty."""
    await rig.decode(HOLDER, **{**overrides, **(holder or {})})
    await rig.client().generate(token_ids=question(0), max_tokens=1)
    await rig.decode(OTHER, **overrides)
    await asyncio.sleep(0.1)  # a beat that tells


def counted(rig: FleetRig, name: str) -> int:
    return sum(worker.counters[name] for worker in rig.workers.values())


async def test_the_holder_gets_what_begins_with_its_prefix() -> None:
    async with FleetRig() as rig:
        await two_workers(rig)
        client = rig.client()
        for number in range(12):
            answer = await client.generate(token_ids=question(number), max_tokens=3)
            assert list(answer.token_ids) == completion(question(number), 3)
            assert answer.served_by.decode == HOLDER
            assert answer.usage.cached_tokens == len(PREFIX)
            await asyncio.sleep(0.1)  # a beat that shows it idle
        assert counted(rig, "handed_over") == counted(rig, "taken_over") > 0
        assert counted(rig, "redeliveries") == 0
        await rig.quiet()


async def test_without_affinity_both_serve() -> None:
    async with FleetRig() as rig:
        await two_workers(rig, affinity=False)
        client = rig.client()
        answers = [await client.generate(token_ids=question(n), max_tokens=1) for n in range(12)]
        assert {answer.served_by.decode for answer in answers} == {HOLDER, OTHER}


async def test_other_prompts_are_nobodys() -> None:
    async with FleetRig() as rig:
        await two_workers(rig)
        for number in range(8):
            await rig.client().generate(token_ids=[number + 1, *question(number)], max_tokens=1)
        assert counted(rig, "handed_over") == 0


async def test_a_holder_that_is_full_is_not_waited_for() -> None:
    async with FleetRig() as rig:
        slow = FakeEngine(blocks=128, step_s=0.01)
        await rig.decode(HOLDER, engine=slow, max_running=1)
        client = rig.client()
        await client.generate(token_ids=question(0), max_tokens=1)
        await rig.decode(OTHER)
        busy = asyncio.create_task(client.generate(token_ids=[1, 2, 3], max_tokens=300))
        await asyncio.sleep(0.2)
        first = await client.generate(token_ids=[1, 2, 3, 4], max_tokens=1)
        for number in range(1, 5):
            started = time.monotonic()
            answer = await client.generate(token_ids=question(number), max_tokens=2)
            assert time.monotonic() - started < 1.0
            if first.served_by.decode == OTHER:  # the holder is the busy one
                assert answer.served_by.decode == OTHER
            assert list(answer.token_ids) == completion(question(number), 2)
        busy.cancel()


async def test_a_holder_that_does_not_answer_is_not_waited_for() -> None:
    """Its beats still come, or have just stopped: the request is served here after a moment, the next ones at once."""
    async with FleetRig() as rig:
        await two_workers(rig)
        heard: list[Handover] = []

        async def silent(message: Incoming) -> None:
            heard.append(decode(message.data, Handover))

        holder = rig.workers[HOLDER]
        beat = holder.beat()
        await rig.kill(HOLDER)
        bus = rig.bus()
        await bus.subscribe(Subjects(MODEL).handover(HOLDER), silent)
        await bus.publish(Subjects(MODEL).beat("decode", HOLDER), encode(beat))
        await asyncio.sleep(0.01)
        started = time.monotonic()
        for number in range(4):
            answer = await rig.client().generate(token_ids=question(number), max_tokens=2)
            assert answer.served_by.decode == OTHER
            assert list(answer.token_ids) == completion(question(number), 2)
        assert time.monotonic() - started < 2.0
        assert len(heard) == 1
        assert counted(rig, "handover_refused") == 1


async def test_a_reply_that_is_lost_ends_in_one_answer() -> None:
    """Both workers serve it then; the client hears each token once."""
    async with FleetRig() as rig:
        await two_workers(rig)
        other = rig.workers[OTHER]
        request = other.bus.request

        async def lossy(
            subject: str, data: bytes, timeout: float, headers: Mapping[str, str] | None = None
        ) -> Incoming:
            answer = await request(subject, data, timeout, headers)
            if ".hand." in subject:
                return Incoming(answer.subject, encode(HandoverReply(taken=False)))
            return answer

        other.bus.request = lossy  # type: ignore[method-assign]
        for number in range(10):
            answer = await rig.client().generate(token_ids=question(number), max_tokens=20)
            assert list(answer.token_ids) == completion(question(number), 20)
            await asyncio.sleep(0.1)  # a beat that shows it idle
        assert counted(rig, "taken_over") > 0
        await rig.quiet()


async def test_the_taker_dies_and_the_request_comes_again() -> None:
    async with FleetRig() as rig:
        await two_workers(rig, holder={"engine": FakeEngine(blocks=128, step_s=0.01)})
        client = rig.client()
        for _ in range(20):  # until the other one pulls it first
            task = asyncio.create_task(client.generate(token_ids=question(1), max_tokens=40))
            await asyncio.sleep(0.15)
            if counted(rig, "taken_over"):
                break
            await task
            await asyncio.sleep(0.1)
        await rig.kill(HOLDER)
        answer = await task
        assert list(answer.token_ids) == completion(question(1), 40)
        assert answer.served_by.decode == OTHER


class SlowTokenizer(FakeTokenizer):
    """Takes longer than the queue waits for an ack."""

    def encode(self, text: str, **_: object) -> list[int]:
        time.sleep(1.0)
        return super().encode(text)


async def test_a_request_that_is_prepared_for_long_comes_in_once() -> None:
    """It is held meanwhile, and a second delivery of it, by the queue or by another worker, is no second request."""
    async with FleetRig() as rig:
        worker = await rig.decode(HOLDER)
        worker._intake._tokenizer = cast("Tokenizer", SlowTokenizer())
        text = " ".join(map(str, question(1)))
        client = rig.client()
        task = asyncio.create_task(client.generate(text, max_tokens=3))
        await asyncio.sleep(0.3)
        bus, subjects = rig.bus(), Subjects(MODEL)
        (job,) = worker.held()
        offer = Handover(worker="x", handle=job.handle, subject=job.subject, request=job.data)
        for _ in range(3):
            await bus.publish(subjects.handover(HOLDER), encode(offer), reply="_INBOX.x")
        answer = await task
        assert list(answer.token_ids) == completion(question(1), 3)
        await asyncio.sleep(1.5)
        assert worker.counters["redeliveries"] == 0
        assert worker.counters["refused_duplicate_request"] == 0
        await rig.quiet()


async def test_a_burst_of_offers_is_not_all_taken() -> None:
    """The fake jobs come from a real one; what counts is how many are let in at once."""
    async with FleetRig() as rig:
        worker = await rig.decode(HOLDER)
        worker._intake._tokenizer = cast("Tokenizer", SlowTokenizer())
        taken = [worker._take(cast("Job", None), "normal") for _ in range(MAX_TAKING)]
        assert taken == [True] * MAX_TAKING
        assert not worker._take(cast("Job", None), "normal")
        rig.expect_death(HOLDER)


@pytest.mark.parametrize("handle", ["", "x", "$JS.ACK.OTHER.c.1.1.1.1.0", "a" * 1024])
async def test_a_forged_offer_is_counted_and_ignored(handle: str) -> None:
    async with FleetRig() as rig:
        await rig.decode(HOLDER)
        bus, subjects = rig.bus(), Subjects(MODEL)
        offer = Handover(worker="x", handle=handle, subject=subjects.request("normal"), request=b'{"id":"a"}')
        for data in (encode(offer), b"garbage", b""):
            await bus.publish(subjects.handover(HOLDER), data, reply="nowhere")
        await asyncio.sleep(0.1)
        assert rig.workers[HOLDER].counters["bad_messages"] == 3
        answer = await rig.client().generate(token_ids=question(1), max_tokens=2)
        assert list(answer.token_ids) == completion(question(1), 2)
