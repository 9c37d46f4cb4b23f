"""Hard moments in a request's life: ids used twice, lost streams, deaths, cancels, hostile messages."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import msgpack
import pytest

from shared.bus.base import Incoming
from shared.codec import decode_event
from shared.errors import TrineError
from shared.messages import Failed, Finished, Tokens
from shared.streams import REQUEST_HEADER
from shared.subjects import Subjects
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL, FleetRig
from trine.client import Priority

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SUBJECTS = Subjects(MODEL)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def engine(step_s: float = 0.005, **options: Any) -> FakeEngine:
    return FakeEngine(blocks=128, step_s=step_s, **options)


class PlainClient:
    """Publishes JSON and listens to one subject, as anybody can; sorts what it hears by the request that it names."""

    def __init__(self, rig: FleetRig, request_id: str) -> None:
        self.id = request_id
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, list[Finished | Failed]] = {}
        self._bus = rig.bus()
        self._news = asyncio.Event()

    async def ask(self, tokens: list[int], max_tokens: int, priority: str = "normal") -> None:
        if not self._bus.subscriptions:
            await self._bus.subscribe(SUBJECTS.events(self.id), self._on_event)
        data = json.dumps({"id": self.id, "token_ids": tokens, "max_tokens": max_tokens}).encode()
        await self._bus.publish(SUBJECTS.request(priority), data)

    async def cancel(self) -> None:
        await self._bus.publish(SUBJECTS.cancel(self.id), b"")

    async def _on_event(self, message: Incoming) -> None:
        request, event = message.headers[REQUEST_HEADER], decode_event(message.data)
        if isinstance(event, Tokens):
            have = self.tokens.setdefault(request, [])
            have[event.index :] = event.token_ids
        else:
            self.ends.setdefault(request, []).append(event)
        self._news.set()
        self._news = asyncio.Event()

    async def has(self, request: str, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.tokens.get(request, [])) < count:
                await self._news.wait()

    async def end(self, request: str) -> Finished | Failed:
        async with asyncio.timeout(5):
            while request not in self.ends:
                await self._news.wait()
        return self.ends[request][0]


def serving(rig: FleetRig) -> str:
    return next(name for name, worker in rig.workers.items() if worker.load().running)


class TestOneIdTwice:
    @pytest.mark.parametrize("workers", [1, 2])
    async def test_the_second_is_refused_by_name_and_the_first_is_answered_right(self, workers: int) -> None:
        async with FleetRig() as rig:
            for number in range(workers):
                await rig.decode(f"decode-{number}", engine(), max_running=3 - workers)
            client = PlainClient(rig, "same")
            await client.ask(prompt(10, 1), 100)
            await client.has("1", 5)
            first = serving(rig)
            for _ in range(2):
                await client.ask(prompt(10, 2), 5)
            for request in ("2", "3"):
                refused = await client.end(request)
                assert isinstance(refused, Failed)
                assert refused.code == "duplicate_request"
            assert "1" not in client.ends
            assert isinstance(await client.end("1"), Finished)
            assert client.tokens == {"1": completion(prompt(10, 1), 100)}
            by = {n for n, w in rig.workers.items() if w.counters["refused_duplicate_request"]}
            assert by == ({first} if workers == 1 else {n for n in rig.workers if n != first})
            await client.ask(prompt(10, 4), 5)  # the id is free again
            assert isinstance(await client.end("4"), Finished)
            assert client.tokens["4"] == completion(prompt(10, 4), 5)
            assert {len(ends) for ends in client.ends.values()} == {1}
            await rig.quiet()

    async def test_the_client_takes_only_its_own_events(self) -> None:
        async with FleetRig() as rig:
            await rig.decode(engine=engine())
            other = PlainClient(rig, "same")
            stream = rig.client().stream(token_ids=prompt(10), max_tokens=60, id="same")
            tokens: list[int] = []
            async for delta in stream:
                tokens += delta.token_ids
                if len(tokens) >= 5 and not other.ends:
                    await other.ask(prompt(10, 2), 5)
                    assert isinstance(await other.end("2"), Failed)
            assert tokens == completion(prompt(10), 60)
            assert stream.completion.finish_reason == "length"

    async def test_the_client_hears_that_its_id_is_in_use(self) -> None:
        async with FleetRig() as rig:
            await rig.decode(engine=engine())
            other = PlainClient(rig, "same")
            await other.ask(prompt(10, 2), 60)
            await other.has("1", 5)
            with pytest.raises(TrineError) as caught:
                await rig.client().generate(token_ids=prompt(10), max_tokens=5, id="same")
            assert caught.value.code == "duplicate_request"
            assert isinstance(await other.end("1"), Finished)
            assert other.tokens["1"] == completion(prompt(10, 2), 60)


class TestCancel:
    async def test_a_cancelled_id_can_be_used_again(self) -> None:
        async with FleetRig() as rig:
            for number in (1, 2):
                await rig.decode(f"decode-{number}", engine())
            client = PlainClient(rig, "again")
            await client.ask(prompt(10), 400)
            await client.has("1", 3)
            await client.cancel()
            end = await client.end("1")
            assert isinstance(end, Finished)
            assert end.reason == "cancelled"
            await asyncio.sleep(0.6)
            for request in ("2", "3"):
                await client.ask(prompt(10), 5)
                end = await client.end(request)
                assert isinstance(end, Finished)
                assert end.reason == "length"

    async def test_after_a_death_whoever_takes_over_ends_it_with_all_there_was(self) -> None:
        """Cancelled while nobody has it: the text that the dead worker held back is shown, and its tokens count."""
        async with FleetRig() as rig:
            await rig.decode(engine=engine(0.01))
            right = completion(prompt(10), 50)
            held = "".join(f"{token} " for token in right)
            stream = rig.client().stream(token_ids=prompt(10), max_tokens=200, stop=f"{held}never"[-250:])
            said = 0
            async for delta in stream:
                said += len(delta.token_ids)
                if said >= 20 and "decode-1" in rig.workers:
                    await rig.kill("decode-1")
                    await rig.decode("decode-2", engine(0.01))
                    await stream.cancel()
            answer = stream.completion
            assert answer.finish_reason == "cancelled"
            assert answer.usage.completion_tokens == len(answer.token_ids) == said
            assert answer.text == "".join(f"{token} " for token in answer.token_ids)

    async def test_after_a_death_its_usage_is_known_also_when_its_events_are_lost(self) -> None:
        async with FleetRig() as rig:
            await rig.decode(engine=engine(0.01))
            stream = rig.client().stream(token_ids=prompt(10), max_tokens=200)
            said = 0
            async for delta in stream:
                said += len(delta.token_ids)
                if said >= 20 and "decode-1" in rig.workers:
                    await rig.kill("decode-1")
                    del rig.broker.streams[SUBJECTS.event_stream]
                    await rig.decode("decode-2", engine(0.01))
                    await stream.cancel()
            usage = stream.completion.usage
            assert stream.completion.finish_reason == "cancelled"
            assert (usage.prompt_tokens, usage.completion_tokens) == (10, said)

    async def test_text_held_back_for_a_stop_string_is_shown(self) -> None:
        async with FleetRig() as rig:
            await rig.decode(engine=engine(0.01))
            client = rig.client()
            held = "".join(f"{t} " for t in completion(prompt(10), 50))
            stream = client.stream(token_ids=prompt(10), max_tokens=300, id="c", stop=[held[:200] + "never"])
            text, cancelled = "", False
            async for delta in stream:
                text += delta.text
                if len(delta.token_ids) and delta.index >= 5 and not cancelled:
                    assert text == ""
                    cancelled = True
                    await client.cancel("c")
            answer = stream.completion
            assert answer.finish_reason == "cancelled"
            assert 5 < answer.usage.completion_tokens < 50
            assert answer.text == text == "".join(f"{t} " for t in answer.token_ids)


class TestLostStreams:
    async def test_a_deleted_event_stream_is_created_again(self) -> None:
        async with FleetRig() as rig:
            await rig.decode(engine=engine())
            client = rig.client()
            del rig.broker.streams[SUBJECTS.event_stream]
            answer = await asyncio.wait_for(client.generate(token_ids=prompt(10), max_tokens=5), 5)
            assert list(answer.token_ids) == completion(prompt(10), 5)
            del rig.broker.streams[SUBJECTS.event_stream]
            with pytest.raises(TrineError) as caught:
                await asyncio.wait_for(client.generate(token_ids=[1000], max_tokens=5), 5)
            assert caught.value.code == "invalid_field"

    async def test_a_request_is_continued_though_its_events_and_its_worker_are_lost(self) -> None:
        async with FleetRig() as rig:
            for number in (1, 2):
                await rig.decode(f"decode-{number}", engine(0.01, seeded=True))
            stream = rig.client().stream(token_ids=prompt(20), max_tokens=40)
            tokens: list[int] = []
            async for delta in stream:
                tokens += delta.token_ids
                if len(tokens) > 10 and len(rig.workers) == 2:
                    await rig.kill(serving(rig))
                    del rig.broker.streams[SUBJECTS.event_stream]
            assert tokens == completion(prompt(20), 40, seed=stream.completion.seed)

    async def test_server_and_worker_crash_together_and_the_answer_stays_one(self) -> None:
        async with FleetRig() as rig:
            await rig.decode("decode-1", engine(0.01, seeded=True))
            stream = rig.client().stream(token_ids=prompt(20), max_tokens=40)
            tokens: list[int] = []
            async for delta in stream:
                tokens += delta.token_ids
                if len(tokens) > 10 and "decode-1" in rig.workers:
                    await rig.kill("decode-1")
                    rig.broker.disconnect()
                    rig.broker.wipe_memory_streams()
                    rig.broker.reconnect()
                    await rig.decode("decode-2", engine(0.01, seeded=True))
            assert tokens == completion(prompt(20), 40, seed=stream.completion.seed)
            assert stream.completion.served_by.decode == "decode-2"

    async def test_a_request_with_the_number_of_one_that_runs_is_served(self) -> None:
        """The server comes back with an empty disk and counts from 1 again."""
        async with FleetRig() as rig:
            worker = await rig.decode(engine=engine(0.01))
            old, new = PlainClient(rig, "old"), PlainClient(rig, "new")
            await old.ask(prompt(10), 150)
            await old.has("1", 3)
            rig.broker.disconnect()
            rig.broker.streams.clear()
            rig.broker.reconnect()
            async with asyncio.timeout(5):
                while len(rig.broker.streams) < len(worker.streams()):
                    await asyncio.sleep(0.01)
            await new.ask(prompt(10, 1), 5)
            assert isinstance(await new.end("1"), Finished)
            assert new.tokens["1"] == completion(prompt(10, 1), 5)
            assert "1" not in old.ends
            assert isinstance(await old.end("1"), Finished)
            assert old.tokens["1"] == completion(prompt(10), 150)


async def test_cached_tokens_are_those_that_the_first_attempt_found() -> None:
    async with FleetRig() as rig:
        for number in (1, 2):
            await rig.decode(f"decode-{number}", engine(0.01))
        client = rig.client()
        await client.generate(token_ids=prompt(16), max_tokens=2)
        await asyncio.sleep(0.1)  # published: the next prompt begins with the same 16 tokens
        stream = client.stream(token_ids=prompt(40), max_tokens=30)
        count = 0
        async for delta in stream:
            count += len(delta.token_ids)
            if count > 10 and len(rig.workers) == 2:
                await rig.kill(serving(rig))
        assert stream.completion.usage.cached_tokens == 16
        again = await client.generate(token_ids=prompt(40), max_tokens=2)
        assert again.usage.cached_tokens == 36


class TestSharing:
    @pytest.mark.parametrize("pause", [0.05, 0.7])
    async def test_an_idle_worker_gets_the_work_that_a_full_one_cannot_do(self, pause: float) -> None:
        """`pause`: also when the full one's last pulls are still out."""
        async with FleetRig() as rig:
            await rig.decode("decode-1", engine(0.01), max_running=1)
            client = rig.client()
            busy = asyncio.create_task(client.generate(token_ids=prompt(10), max_tokens=300))
            await asyncio.sleep(0.05)
            await rig.decode("decode-2", engine(0.001), max_running=1)
            await asyncio.sleep(pause)
            order: list[Priority] = ["high", "low", "normal", "high"]
            for number, priority in enumerate(order, start=1):
                started = time.monotonic()
                answer = await client.generate(token_ids=prompt(10, number), max_tokens=2, priority=priority)
                assert time.monotonic() - started < 1.0
                assert answer.served_by.decode == "decode-2"
            assert not busy.done()
            busy.cancel()

    async def test_a_request_that_waits_for_a_full_worker_is_served_when_it_has_room(self) -> None:
        async with FleetRig() as rig:
            await rig.decode(engine=engine(), max_running=1)
            client = rig.client()
            order: list[Priority] = ["normal", "high", "low", "normal", "high", "low"]
            answers = await asyncio.gather(
                *(client.generate(token_ids=prompt(10, n), max_tokens=20, priority=p) for n, p in enumerate(order))
            )
            for number, answer in enumerate(answers):
                assert list(answer.token_ids) == completion(prompt(10, number), 20)


class TestHostileMessages:
    @pytest.mark.parametrize(
        ("data", "refused_as"),
        [
            (b'{"id":"\\ud800","prompt":"1"}', "seq-1"),
            (b'{"id":"","prompt":"1"}', "seq-1"),
            (b'{"id":"x","prompt":"1","' + b"k" * 600_000 + b'":1}', "x"),
            (b'{"id":"x","prompt":"1","' + b"\\u0001" * 100_000 + b'":1}', "x"),
            (b'{"id":"x","prompt":"1","v":' + b"9" * 5000 + b"}", "x"),
            (b'{"prompt":' + b"[" * 100_000, "seq-1"),
            (b'{"prompt":"' + b"1 " * 50_000 + b'","id":"x"}', "x"),
            (msgpack.packb({"id": "x", "prompt": "1 " * 50_000}), "x"),
            (msgpack.packb({"id": "x", "prompt": "1", "k" * 600_000: 1}), "x"),
            (msgpack.packb({"id": "x", "prompt": "1", "v": "9" * 600_000}), "x"),
        ],
        ids=[
            "surrogate",
            "empty",
            "long key",
            "escapes",
            "long version",
            "deep",
            "long",
            "packed long",
            "packed key",
            "packed version",
        ],
    )
    async def test_a_poisoned_request_is_answered_and_ends_no_worker(self, data: bytes, refused_as: str) -> None:
        async with FleetRig() as rig:
            worker = await rig.decode()
            worker.bus.max_payload = (1 << 20) - 4096  # type: ignore[misc]  # a plain nats-server's
            bus = rig.bus()
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

            async def on_event(message: Incoming) -> None:
                answer.set_result(decode_event(message.data))

            for subject in (SUBJECTS.refused(), SUBJECTS.events("x")):
                await bus.subscribe(subject, on_event)
            await bus.publish(SUBJECTS.request("normal"), data)
            event = await asyncio.wait_for(answer, 5)
            assert isinstance(event, Failed)
            assert event.id == refused_as
            assert len(event.message) < 1000
            good = await rig.client().generate(token_ids=prompt(9), max_tokens=4)
            assert list(good.token_ids) == completion(prompt(9), 4)
            assert rig.broker.streams[SUBJECTS.request_stream].state().messages == 0

    @pytest.mark.parametrize(
        "fields",
        [
            {"worker": ""},
            {"worker": "w" * 5000},
            {"counters": {str(n): n for n in range(50_000)}},
            {"counters": {"k" * 5000: 1}},
            {"counters": {str(n): n for n in range(1_000_000)}},
        ],
        ids=["no name", "long name", "many counters", "long counter", "beyond the limit"],
    )
    async def test_a_hostile_beat_is_refused_and_disturbs_nobody(self, fields: dict[str, Any]) -> None:
        beat = {"v": 1, "type": "beat", "role": "drafter", "worker": "evil", "vocabulary": "fake-vocabulary"}
        data = msgpack.packb({**beat, **fields})
        async with FleetRig() as rig:
            worker = await rig.decode(engine=engine())
            bus = rig.bus()
            bus.max_payload = 64 << 20
            task = asyncio.create_task(rig.client().generate(token_ids=prompt(20), max_tokens=40))
            await asyncio.sleep(0.05)
            await bus.publish(SUBJECTS.beat("drafter", "evil"), data)
            answer = await asyncio.wait_for(task, 10)
            assert list(answer.token_ids) == completion(prompt(20), 40)
            assert worker.counters["bad_messages"] == 1
            assert worker.peers.alive("drafter", time.monotonic()) == []
