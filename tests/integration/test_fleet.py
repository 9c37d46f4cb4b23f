"""The whole path on an in-memory bus: prompt in, tokens out, through prefill, shared cache, decode and drafter."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from shared.bus.base import Incoming
from shared.codec import decode_event, encode
from shared.errors import TrineError
from shared.messages import Beat, Draft, Drafts, Failed, Finished, Tokens
from shared.subjects import Subjects
from tests.cache_rig import eventually
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL, FleetRig
from trine.completion import Completion

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def check(answer: Completion, tokens: list[int], count: int) -> None:
    wanted = completion(tokens, count)
    assert list(answer.token_ids) == wanted
    assert answer.text == "".join(f"{t} " for t in wanted)
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.usage.completion_tokens == count
    assert answer.finish_reason == "length"


async def test_decode_alone_answers() -> None:
    async with FleetRig() as rig:
        await rig.decode()
        answer = await rig.client().generate(token_ids=prompt(50), max_tokens=20)
        check(answer, prompt(50), 20)
        assert answer.served_by.decode == "decode-1"
        assert answer.served_by.prefill == []
        await rig.quiet()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 12, 13, 16, 17, 40, 41])
async def test_every_length_through_a_prefill_worker(length: int) -> None:
    async with FleetRig() as rig:
        await rig.decode(local_prefill_tokens=0)
        await rig.prefill()
        client = rig.client()
        cold = await client.generate(token_ids=prompt(length), max_tokens=9)
        warm = await client.generate(token_ids=prompt(length), max_tokens=9)
        check(cold, prompt(length), 9)
        check(warm, prompt(length), 9)
        assert cold.usage.cached_tokens == 0
        assert warm.usage.cached_tokens == (length - 1) // 4 * 4
        if length > 4:
            assert cold.served_by.prefill == ["prefill-1"]
            assert rig.engines["decode-1"].tokens_computed < 4 + 4 + 2 * 9


async def test_another_decode_worker_finds_the_prefix_in_the_shared_cache() -> None:
    async with FleetRig() as rig:
        await rig.decode("decode-1")
        await rig.client().generate(token_ids=prompt(40), max_tokens=5)
        await asyncio.sleep(0.1)
        await rig.kill("decode-1")
        await rig.decode("decode-2")
        answer = await rig.client().generate(token_ids=prompt(40), max_tokens=5)
        check(answer, prompt(40), 5)
        assert answer.usage.cached_tokens == 36
        assert rig.engines["decode-2"].tokens_computed == 4 + 4


async def test_the_next_turn_reuses_the_generated_blocks_too() -> None:
    async with FleetRig() as rig:
        await rig.decode()
        client = rig.client()
        first = await client.generate(token_ids=prompt(21), max_tokens=20)
        history = prompt(21) + list(first.token_ids)
        second = await client.generate(token_ids=[*history, 1, 2, 3], max_tokens=5)
        check(second, [*history, 1, 2, 3], 5)
        assert second.usage.cached_tokens == 40


async def test_other_weights_never_share_a_block() -> None:
    async with FleetRig() as rig:
        await rig.decode("decode-1")
        await rig.client().generate(token_ids=prompt(40), max_tokens=5)
        await asyncio.sleep(0.1)
        await rig.kill("decode-1")
        await rig.decode("decode-2", FakeEngine(blocks=128, fingerprint="other-weights"))
        answer = await rig.client().generate(token_ids=prompt(40), max_tokens=5)
        assert answer.usage.cached_tokens == 0


@pytest.mark.parametrize("source", ["model", "suffix", "auto"])
async def test_a_drafter_changes_speed_only(source: str) -> None:
    async with FleetRig() as rig:
        await rig.decode(draft_depth=4, draft_wait_ms=200, draft_adaptive=False)
        await rig.drafter(draft_source=source)
        answer = await rig.client().generate(token_ids=prompt(30), max_tokens=60)
        check(answer, prompt(30), 60)
        assert answer.usage.drafted_tokens >= answer.usage.accepted_tokens > 0
        assert rig.engines["decode-1"].steps < 60
        assert answer.served_by.drafter[0].startswith("drafter-1:")


async def test_a_drafter_that_is_always_wrong_costs_speed_only() -> None:
    async with FleetRig() as rig:
        await rig.decode(draft_depth=3, draft_wait_ms=200, draft_adaptive=False)
        await rig.drafter(engine=FakeEngine(blocks=128, wrong_every=1))
        answer = await rig.client().generate(token_ids=prompt(30), max_tokens=25)
        check(answer, prompt(30), 25)
        assert answer.usage.accepted_tokens == 0
        assert answer.usage.drafted_tokens > 0


@pytest.mark.parametrize("seeded", [False, True])
async def test_a_drafter_killed_half_way_is_not_noticed_in_the_text(seeded: bool) -> None:
    async with FleetRig() as rig:
        engine = FakeEngine(blocks=128, step_s=0.005, seeded=seeded)
        await rig.decode(engine=engine, draft_depth=3, draft_wait_ms=50, draft_adaptive=False)
        await rig.drafter(engine=FakeEngine(blocks=128, seeded=seeded))
        stream = rig.client().stream(token_ids=prompt(30), max_tokens=60, seed=9)
        tokens: list[int] = []
        async for delta in stream:
            tokens += delta.token_ids
            if len(tokens) > 20 and "drafter-1" in rig.workers:
                await rig.kill("drafter-1")
        assert tokens == completion(prompt(30), 60, seed=9 if seeded else 0)
        assert stream.completion.usage.accepted_tokens > 0


async def test_many_requests_at_once_each_get_their_own_answer() -> None:
    async with FleetRig() as rig:
        await rig.decode("decode-1", max_running=6)
        await rig.decode("decode-2", max_running=6)
        await rig.prefill()
        await rig.drafter(draft_source="auto")
        client = rig.client()
        prompts = [prompt(5 + 7 * n, seed=n) for n in range(24)]
        answers = await asyncio.gather(*(client.generate(token_ids=p, max_tokens=15) for p in prompts))
        for answer, tokens in zip(answers, prompts, strict=True):
            check(answer, tokens, 15)
        assert {a.served_by.decode for a in answers} == {"decode-1", "decode-2"}
        await rig.quiet()


async def test_one_prefix_wanted_by_many_is_prefilled_once() -> None:
    async with FleetRig() as rig:
        for number in range(3):
            await rig.decode(f"decode-{number}", max_running=2)
        await rig.prefill(engine=FakeEngine(blocks=128, step_s=0.02))
        client = rig.client()
        answers = await asyncio.gather(*(client.generate(token_ids=prompt(101), max_tokens=4) for _ in range(6)))
        for answer in answers:
            check(answer, prompt(101), 4)
        assert rig.engines["prefill-1"].tokens_computed == 100


async def test_workers_without_work_leave_the_cores_to_others() -> None:
    """And not between two steps of one answer, or of one prompt."""
    async with FleetRig() as rig:
        await rig.decode()
        worker = await rig.prefill(chunk_tokens=8)
        check(await rig.client().generate(token_ids=prompt(41), max_tokens=9), prompt(41), 9)
        await rig.quiet()
        await eventually(lambda: not worker.load().running)
        for name, steps in (("decode-1", 9), ("prefill-1", 5)):
            engine = rig.engines[name]
            assert engine.steps >= steps, name
            assert set(engine.rested_after) == {0, engine.steps}, f"{name} is at work in between"


async def test_a_tiny_pool_preempts_and_everything_finishes_right() -> None:
    async with FleetRig() as rig:
        worker = await rig.decode(engine=FakeEngine(blocks=24), max_running=8)
        client = rig.client()
        answers = await asyncio.gather(
            *(client.generate(token_ids=prompt(20, seed=n), max_tokens=40) for n in range(8))
        )
        for number, answer in enumerate(answers):
            check(answer, prompt(20, seed=number), 40)
        assert worker.scheduler.preemptions > 0
        await rig.quiet()


class TestDeaths:
    async def test_a_killed_decode_worker_is_continued_by_another(self) -> None:
        async with FleetRig() as rig:
            for number in (1, 2):
                await rig.decode(f"decode-{number}", FakeEngine(blocks=128, step_s=0.01, seeded=True))
            stream = rig.client().stream(token_ids=prompt(30), max_tokens=60)
            tokens: list[int] = []
            killed = ""
            async for delta in stream:
                tokens += delta.token_ids
                if len(tokens) > 15 and not killed:
                    killed = next(n for n, w in rig.workers.items() if w.load().running)
                    await rig.kill(killed)
            answer = stream.completion
            assert tokens == completion(prompt(30), 60, seed=answer.seed)
            assert answer.usage.completion_tokens == 60
            assert answer.served_by.decode != killed

    async def test_a_killed_prefill_worker_is_done_without(self) -> None:
        async with FleetRig() as rig:
            await rig.decode(local_prefill_tokens=0)
            await rig.prefill(engine=FakeEngine(blocks=128, step_s=0.2))
            task = asyncio.create_task(rig.client().generate(token_ids=prompt(200), max_tokens=5))
            await asyncio.sleep(0.5)
            await rig.kill("prefill-1")
            check(await asyncio.wait_for(task, 10), prompt(200), 5)

    async def test_a_prefill_worker_that_hangs_is_done_without(self) -> None:
        async with FleetRig() as rig:
            worker = await rig.decode(local_prefill_tokens=0, prefill_patience_s=0.5)
            await rig.prefill(engine=FakeEngine(blocks=128, step_s=5.0))
            answer = await rig.client().generate(token_ids=prompt(100), max_tokens=5)
            check(answer, prompt(100), 5)
            assert worker.counters["prefill_given_up"] == 1

    async def test_a_job_of_a_killed_prefill_worker_is_done_by_another(self) -> None:
        async with FleetRig() as rig:
            await rig.decode(local_prefill_tokens=0, prefill_patience_s=5.0)
            await rig.prefill("prefill-1", FakeEngine(blocks=128, step_s=0.1))
            task = asyncio.create_task(rig.client().generate(token_ids=prompt(200), max_tokens=5))
            await asyncio.sleep(0.3)
            await rig.prefill("prefill-2")
            await rig.kill("prefill-1")
            check(await asyncio.wait_for(task, 10), prompt(200), 5)
            assert rig.engines["prefill-2"].tokens_computed > 0

    async def test_a_frozen_worker_that_wakes_is_fenced_off(self) -> None:
        async with FleetRig() as rig:
            frozen = await rig.decode("decode-1", FakeEngine(blocks=128, step_s=0.01))
            stream = rig.client().stream(token_ids=prompt(30), max_tokens=80)
            tokens: list[int] = []
            buses = rig._buses["decode-1"]
            async for delta in stream:
                tokens += delta.token_ids
                if len(tokens) > 10 and "decode-2" not in rig.workers:
                    for bus in buses:
                        bus.disconnect()  # its holds and events do not arrive; it goes on computing
                    await rig.decode("decode-2", FakeEngine(blocks=128, step_s=0.01))
                if len(tokens) > 40:
                    for bus in buses:
                        bus.reconnect()
            assert tokens == completion(prompt(30), 80)
            assert stream.completion.served_by.decode == "decode-2"
            async with asyncio.timeout(5):
                while frozen.load().running:
                    await asyncio.sleep(0.02)

    async def test_a_step_that_fails_fails_one_request_only(self) -> None:
        async with FleetRig() as rig:
            engine = FakeEngine(blocks=128, step_s=0.01)
            engine.poison = 999
            await rig.decode(engine=engine)
            client = rig.client()
            good = [t % 900 for t in prompt(20)]
            results = await asyncio.gather(
                client.generate(token_ids=good, max_tokens=4),
                client.generate(token_ids=[999] * 20, max_tokens=10),
                return_exceptions=True,
            )
            assert isinstance(results[1], TrineError)
            assert not isinstance(results[0], BaseException)
            await rig.quiet()

    async def test_the_bus_restarts_under_load(self) -> None:
        async with FleetRig() as rig:
            await rig.decode(engine=FakeEngine(blocks=128, step_s=0.01))
            await rig.prefill()
            client = rig.client()
            tasks = [asyncio.create_task(client.generate(token_ids=prompt(40, n), max_tokens=60)) for n in range(4)]
            await asyncio.sleep(0.4)
            rig.broker.disconnect()
            rig.broker.wipe_memory_streams()
            await asyncio.sleep(0.3)
            rig.broker.reconnect()
            for number, answer in enumerate(await asyncio.wait_for(asyncio.gather(*tasks), 30)):
                check(answer, prompt(40, number), 60)
            check(await client.generate(token_ids=prompt(40, 9), max_tokens=5), prompt(40, 9), 5)

    async def test_draining_finishes_what_runs_and_takes_nothing_new(self) -> None:
        async with FleetRig() as rig:
            await rig.decode("decode-1", FakeEngine(blocks=128, step_s=0.01))
            client = rig.client()
            task = asyncio.create_task(client.generate(token_ids=prompt(20), max_tokens=40))
            await asyncio.sleep(0.2)
            drained = asyncio.create_task(rig.drain("decode-1"))
            await asyncio.sleep(0.05)
            later = asyncio.create_task(client.generate(token_ids=prompt(10), max_tokens=3))
            check(await task, prompt(20), 40)
            await drained
            await rig.decode("decode-2")
            answer = await later
            assert answer.served_by.decode == "decode-2"
            check(answer, prompt(10), 3)

    async def test_what_does_not_finish_in_time_is_handed_back(self) -> None:
        async with FleetRig() as rig:
            await rig.decode("decode-1", FakeEngine(blocks=128, step_s=0.02), drain_s=0.1)
            task = asyncio.create_task(rig.client().generate(token_ids=prompt(20), max_tokens=60))
            await asyncio.sleep(0.3)
            await rig.decode("decode-2")
            await rig.drain("decode-1")
            check(await asyncio.wait_for(task, 10), prompt(20), 60)


class TestCancel:
    async def test_while_running_and_while_queued(self) -> None:
        async with FleetRig() as rig:
            worker = await rig.decode(engine=FakeEngine(blocks=128, step_s=0.01), max_running=1)
            client = rig.client()
            running = client.stream(token_ids=prompt(10), max_tokens=400, id="running")
            queued = asyncio.create_task(client.generate(token_ids=prompt(10, 1), max_tokens=5, id="queued"))
            async for delta in running:
                if delta.index == 5:
                    await client.cancel("queued")
                    await client.cancel("running")
            assert running.completion.finish_reason == "cancelled"
            assert (await queued).finish_reason == "cancelled"
            assert worker.counters["cancelled"] >= 1
            await rig.quiet()

    async def test_at_random_moments_leaks_nothing(self) -> None:
        async with FleetRig() as rig:
            await rig.decode(engine=FakeEngine(blocks=128, step_s=0.002))
            await rig.prefill(engine=FakeEngine(blocks=128, step_s=0.005))
            client = rig.client()
            rng = random.Random(1)

            async def one(number: int) -> None:
                stream = client.stream(token_ids=prompt(5 + number % 60, number), max_tokens=30)
                try:
                    async with asyncio.timeout(rng.random() * 0.3), stream:
                        async for _ in stream:
                            pass
                except TimeoutError:
                    pass

            for start in range(0, 60, 12):
                await asyncio.gather(*(one(n) for n in range(start, start + 12)))
            await rig.quiet()
            check(await client.generate(token_ids=prompt(100), max_tokens=5), prompt(100), 5)


class TestForgery:
    async def test_malformed_drafts_are_ignored_and_counted(self) -> None:
        forged = [
            b"garbage",
            encode(Drafts(worker="evil", drafts=[Draft(session="r", position=1, token_ids=[5], source="x")])),
            encode(Drafts(worker="evil", drafts=[Draft(session="other", position=31, token_ids=[5], source="x")])),
            encode(Drafts(worker="evil", drafts=[], unknown=["r", "nobody"])),
            encode(Drafts(worker="evil", drafts=[Draft(session="r", position=31, token_ids=[10**6], source="x")])),
        ]
        async with FleetRig() as rig:
            worker = await rig.decode(draft_depth=4, draft_wait_ms=50, draft_adaptive=False)
            bus, subjects, turn = rig.bus("evil"), Subjects(MODEL), itertools.count()

            async def answer(message: Incoming) -> None:
                await bus.publish(message.reply, forged[next(turn) % len(forged)])

            async def beat() -> None:
                while True:
                    vocabulary = Beat(role="drafter", worker="evil", vocabulary="fake-vocabulary")
                    await bus.publish(subjects.beat("drafter", "evil"), encode(vocabulary))
                    await asyncio.sleep(0.05)

            await bus.subscribe(subjects.draft("evil"), answer)
            beats = asyncio.create_task(beat())
            await asyncio.sleep(0.2)
            reply = await rig.client().generate(token_ids=prompt(30), max_tokens=40, id="r")
            beats.cancel()
            check(reply, prompt(30), 40)
            assert worker.counters["bad_drafts"] > 0
            assert worker.counters["drafts_ignored"] > 0

    async def test_garbage_on_every_subject_disturbs_nobody(self) -> None:
        async with FleetRig() as rig:
            decode = await rig.decode(local_prefill_tokens=0)
            prefill = await rig.prefill()
            drafter = await rig.drafter()
            bus, subjects = rig.bus(), Subjects(MODEL)
            for data in (b"", b"garbage", b"{", b"\x80\x04K\x01.", b"\x91" * 5000, bytes(range(256)) * 100):
                for subject in (
                    subjects.request("normal"),
                    subjects.prefill(b"\1" * 32),
                    subjects.block(b"\2" * 32),
                    subjects.draft("drafter-1"),
                    subjects.cancel("x"),
                    subjects.beat("decode", "y"),
                    subjects.events("z"),
                ):
                    await bus.publish(subject, data)
            await asyncio.sleep(0.3)
            check(await rig.client().generate(token_ids=prompt(40), max_tokens=10), prompt(40), 10)
            assert decode.counters["refused_bad_message"] == 6
            assert prefill.counters["jobs_refused"] >= 1
            assert drafter.counters["bad_messages"] >= 6


class TestPlainClients:
    async def collect(self, rig: FleetRig, request_id: str, data: bytes) -> list[Tokens | Finished | Failed]:
        bus, events = rig.bus(), []
        done = asyncio.Event()

        async def on_event(message: Incoming) -> None:
            event = decode_event(message.data)
            assert message.data[:1] == data[:1]
            events.append(event)
            if not isinstance(event, Tokens):
                done.set()

        await bus.subscribe(Subjects(MODEL).events(request_id), on_event)
        await bus.publish(Subjects(MODEL).request("normal"), data)
        await asyncio.wait_for(done.wait(), 5)
        return events

    async def test_json_in_json_out_in_order_with_one_end(self) -> None:
        async with FleetRig() as rig:
            await rig.decode()
            events = await self.collect(rig, "a1", b'{"id":"a1","prompt":"1 2 3","max_tokens":12}')
            tokens = [e for e in events if isinstance(e, Tokens)]
            assert [t for e in tokens for t in e.token_ids] == completion([1, 2, 3], 12)
            assert [e.index for e in tokens] == [sum(len(p.token_ids) for p in tokens[:i]) for i in range(len(tokens))]
            assert isinstance(events[-1], Finished)

    @pytest.mark.parametrize(
        ("fields", "code"),
        [
            ('"prompt":""', "empty_prompt"),
            ('"token_ids":[]', "empty_prompt"),
            ('"messages":[]', "empty_prompt"),
            ('"prompt":"' + "1 " * 600 + '"', "context_length_exceeded"),
            ('"prompt":"1","model":"nope"', "unknown_model"),
            ('"prompt":"1","temperature":NaN', "invalid_field"),
            ('"prompt":"1","top_p":0', "invalid_field"),
            ('"prompt":"1","max_tokens":-1', "invalid_field"),
            ('"token_ids":[1000]', "invalid_field"),
            ('"token_ids":[-1]', "invalid_field"),
            ('"prompt":"1","v":2', "unsupported_version"),
            ('"prompt":' + "[" * 100_000, "bad_message"),
            ('"prompt":"' + "x" * (5 << 20) + '"', "too_large"),
        ],
    )
    async def test_each_bad_request_gets_its_own_typed_event(self, fields: str, code: str) -> None:
        async with FleetRig() as rig:
            await rig.decode()
            events = await self.collect(rig, "bad", ('{"id":"bad",' + fields + "}").encode())
            assert len(events) == 1
            assert isinstance(events[0], Failed)
            assert events[0].code == code
            check(await rig.client().generate(token_ids=prompt(9), max_tokens=4), prompt(9), 4)

    async def test_a_request_for_a_model_nobody_serves_is_answered_too(self) -> None:
        async with FleetRig() as rig:
            await rig.decode()
            bus = rig.bus()
            answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

            async def on_event(message: Incoming) -> None:
                answer.set_result(message.data)

            await bus.subscribe(Subjects("nope").events("x"), on_event)
            await bus.publish(Subjects("nope").request("normal"), b'{"id":"x","prompt":"1"}')
            event = decode_event(await asyncio.wait_for(answer, 5))
            assert isinstance(event, Failed)
            assert event.code == "unknown_model"

    async def test_an_expired_request_is_not_run(self) -> None:
        async with FleetRig() as rig:
            engine = FakeEngine(blocks=128, step_s=0.02)
            await rig.decode(engine=engine, max_running=1)
            client = rig.client()
            first = asyncio.create_task(client.generate(token_ids=prompt(9), max_tokens=40))
            await asyncio.sleep(0.1)
            with pytest.raises(TrineError) as caught:
                await client.generate(token_ids=[7] * 9, max_tokens=4, deadline_ms=200)
            assert caught.value.code == "deadline_exceeded"
            check(await first, prompt(9), 40)
            await rig.quiet()


class TestBrokenEngine:
    async def test_an_engine_that_fails_everybody_ends_its_worker_and_others_go_on(self) -> None:
        """Nobody is blamed for it: the requests are served by whoever is left."""
        async with FleetRig() as rig:
            broken = FakeEngine(blocks=128, step_s=0.01)
            worker = await rig.decode("decode-1", broken)
            client = rig.client()
            prompts = [[seed * 31 + n for n in range(12)] for seed in range(3)]
            tasks = [asyncio.create_task(client.generate(token_ids=p, max_tokens=40)) for p in prompts]
            async with asyncio.timeout(5):
                while worker.scheduler.running < 3 or broken.steps < 8:
                    await asyncio.sleep(0.005)

            def fail(spans: object) -> list[list[int]]:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            rig.expect_death("decode-1")
            broken.step = fail  # type: ignore[method-assign]
            await rig.dead("decode-1")
            await rig.decode("decode-2", FakeEngine(blocks=128))
            for prompt, task in zip(prompts, tasks, strict=True):
                assert list((await task).token_ids) == completion(prompt, 40)
