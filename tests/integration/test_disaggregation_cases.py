"""Failure cases of split prefill and decode met in the field, over whole fleets: hand-overs, ids, rolling restarts."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from shared.bus.base import Incoming
from shared.codec import decode_event
from shared.errors import InvalidField
from shared.messages import Failed, Finished, Tokens
from shared.tokenizer import Tokenizer
from tests.block_faults import SUBJECTS, BlockFaults, FaultyFleet, ask, prompt
from tests.cache_rig import eventually
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import FleetRig
from tests.streamed import consume, words
from trine.client import Client
from trine.completion import Completion

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
B = 4
T_MS = 10_000
"""The deadline of requests under whose way workers leave: they are answered long before."""


@pytest.mark.parametrize("packed", [False, True])
async def test_case_59_a_prompt_one_token_too_long_has_one_error_and_no_tokens(packed: bool) -> None:
    """As token ids, of which the client knows no limit; neither worker computes any of it."""
    async with FleetRig() as rig:
        decode = await rig.decode(engine=FakeEngine(blocks=128, context=100), local_prefill_tokens=0)
        prefill = await rig.prefill(engine=FakeEngine(blocks=128, context=100))
        bus, events = rig.bus(), []

        async def on_event(message: Incoming) -> None:
            events.append(decode_event(message.data))

        await bus.subscribe(SUBJECTS.events("long"), on_event)
        request = {"v": 1, "type": "generate", "id": "long", "token_ids": prompt(101), "max_tokens": 5}
        await bus.publish(
            SUBJECTS.request("normal"), msgpack.packb(request) if packed else json.dumps(request).encode()
        )
        await eventually(lambda: bool(events))
        await ask(rig.client(), prompt(99), 1)  # the longest that leaves room for a token
        [event] = events
        assert isinstance(event, Failed)
        assert (event.code, event.field) == ("context_length_exceeded", "token_ids")
        assert (decode.counters["prefill_jobs"], prefill.counters["jobs_refused"]) == (1, 0)
        await rig.quiet()


async def test_case_64_ids_that_are_empty_or_10_kb_are_refused_and_harm_nobody() -> None:
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=128, step_s=0.01))
        client, bus = rig.client(), rig.bus()
        running = asyncio.create_task(ask(client, prompt(20), 40, id="good"))
        refused: list[Any] = []

        async def on_refusal(message: Incoming) -> None:
            refused.append(decode_event(message.data))

        await bus.subscribe(SUBJECTS.refused(), on_refusal)
        for request_id in ("", "x" * 10_000):
            with pytest.raises(InvalidField) as caught:
                await client.generate(token_ids=prompt(9), max_tokens=3, id=request_id)
            assert caught.value.field == "id"
            request = {"id": request_id, "token_ids": prompt(9), "max_tokens": 3}
            await bus.publish(SUBJECTS.request("normal"), json.dumps(request).encode())
        await eventually(lambda: len(refused) == 2)
        assert [(type(event), event.field) for event in refused] == [(Failed, "id")] * 2
        assert max(len(event.message) for event in refused) < 1000
        await running
        await ask(client, prompt(9), 3, id="x" * 128)
        await rig.quiet()


@pytest.mark.parametrize("drafted", [False, True])
async def test_case_65_the_first_tokens_are_neither_doubled_nor_lost(drafted: bool) -> None:
    """Handed over from a prefill worker, cold, warm and computed here, around the edges of blocks."""
    async with FleetRig() as rig:
        drafting: dict[str, Any] = {"draft_depth": 4, "draft_wait_ms": 50, "draft_adaptive": False} if drafted else {}
        await rig.decode(local_prefill_tokens=8, **drafting)
        await rig.prefill()
        if drafted:
            await rig.drafter()
        client = rig.client()
        for length in (7, 16, 17, 18):
            for count in (1, 2, 3):
                tokens = prompt(length, 100 * length + count)
                cold, warm = await ask(client, tokens, count), await ask(client, tokens, count)
                assert cold.finish_reason == warm.finish_reason == "length"
                assert cold.text == warm.text == words(completion(tokens, count))
                assert bool(cold.served_by.prefill) == (length > 12)
        await rig.quiet()


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_case_65_an_answer_whose_first_token_is_its_end(number: int) -> None:
    """Or its second, or third."""
    tokens = prompt(17)
    eos = completion(tokens, number)[-1]
    async with FleetRig() as rig:
        await rig.decode(engine=FakeEngine(blocks=128).with_eos(eos), local_prefill_tokens=0)
        await rig.prefill(engine=FakeEngine(blocks=128).with_eos(eos))
        for cached in (0, 16):
            answer = await consume(rig.client().stream(token_ids=tokens, max_tokens=9))
            assert list(answer.token_ids) == completion(tokens, number)
            assert answer.text == words(completion(tokens, number)[:-1])
            assert (answer.finish_reason, answer.usage.completion_tokens) == ("stop", number)
            assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (17, cached)


@pytest.mark.parametrize("phase", [0.01, 0.15])
async def test_case_66_one_cancel_in_mid_transfer_costs_the_others_nothing(phase: float) -> None:
    async with FaultyFleet() as rig:
        prompts = [prompt(10 * B + 1, n) for n in range(8)]
        decode = await rig.decode(engine=FakeEngine(blocks=256), local_prefill_tokens=0, prefill_patience_s=5.0)
        prefill = await rig.prefill(engine=FakeEngine(blocks=256, step_s=0.005), max_jobs=8)
        rig.faults_of["decode-1"] = BlockFaults(read_s=0.02)
        client = rig.client()
        cancelled = asyncio.create_task(client.generate(token_ids=prompts[0], max_tokens=20, id="cancelled"))
        tasks = [asyncio.create_task(ask(client, tokens, 20)) for tokens in prompts[1:]]
        await eventually(lambda: rig.faults_of["decode-1"].reading > 0)
        await asyncio.sleep(phase)
        assert rig.faults_of["decode-1"].reading > 0
        await client.cancel("cancelled")
        for answer in await asyncio.gather(*tasks):
            assert (answer.served_by.decode, answer.served_by.prefill) == ("decode-1", ["prefill-1"])
        assert (await cancelled).finish_reason == "cancelled"
        assert rig.workers == {"decode-1": decode, "prefill-1": prefill}
        await rig.quiet()
        await eventually(lambda: not prefill.load().running and not prefill._allocator.in_use)


def shared_tokenizer() -> Tokenizer:
    """Bytes, as a fast tokenizer of Rust has them; its ids are within the fake engine's vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"
    return Tokenizer(json.loads(backend.to_str()), template, {})


async def test_case_116_sixty_four_mixed_requests_share_one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = shared_tokenizer()
    monkeypatch.setattr("tests.fleet_rig.FakeTokenizer", lambda: tokenizer)
    async with FleetRig() as rig:
        for name in ("decode-1", "decode-2"):
            await rig.decode(name, FakeEngine(blocks=1024), max_running=32)
        client, rng = rig.client(), random.Random(0)

        def text(number: int) -> str:
            return f"{number}: " + "".join(rng.choice("añ客🙂 <|") for _ in range(rng.randrange(1, 60)))

        asked: list[tuple[list[int], asyncio.Task[Completion]]] = []
        for number in range(64):
            said = text(number)
            if number % 3 == 0:
                wishes: dict[str, Any] = {"prompt": said}
                tokens = list(said.encode())
            elif number % 3 == 1:
                wishes = {"messages": [{"role": "user", "content": said}]}
                tokens = list(f"user: {said}".encode())
            else:
                wishes = {"token_ids": prompt(20, number), "stop": ["never there"], "logprobs": True}
                tokens = []
            wishes |= {"max_tokens": 5 + number % 7, "temperature": number % 2}
            ids = wishes.get("token_ids") or tokenizer.encode(bytes(tokens).decode())
            asked.append((ids, asyncio.create_task(client.generate(**wishes))))
        for ids, task in asked:
            answer = await task
            wanted = completion(ids, answer.usage.completion_tokens)
            assert list(answer.token_ids) == wanted
            assert answer.usage.prompt_tokens == len(ids)
        await rig.quiet()


class Load:
    """Eight streams at a time, one after another, all answered right, until it is told to end."""

    def __init__(self, client: Client, streams: int = 8) -> None:
        self.done = 0
        self._client, self._ending = client, False
        self._tasks = [asyncio.create_task(self._ask(n)) for n in range(streams)]

    async def _ask(self, number: int) -> None:
        while not self._ending:
            number += 8
            answer = await consume(self._client.stream(token_ids=prompt(40, number), max_tokens=30, deadline_ms=T_MS))
            assert list(answer.token_ids) == completion(prompt(40, number), 30)
            assert answer.usage.completion_tokens == 30
            self.done += 1

    async def another(self, count: int = 4) -> None:
        """Wait until so many more are answered."""
        wanted = self.done + count
        async with asyncio.timeout(10):
            while self.done < wanted:
                await asyncio.sleep(0.01)
                for task in self._tasks:
                    if task.done():
                        await task

    async def end(self) -> None:
        self._ending = True
        await asyncio.gather(*self._tasks)


@pytest.mark.slow
async def test_case_124_each_worker_of_each_role_is_replaced_under_load() -> None:
    """Told to stop one by one, each when its successor serves; then with more workers than before, then with fewer."""
    async with FleetRig() as rig:
        starts: dict[str, Callable[..., Awaitable[object]]]
        starts = {"prefill": rig.prefill, "drafter": rig.drafter, "decode": rig.decode}
        decode = {"local_prefill_tokens": 0, "max_running": 6, "draft_depth": 2, "draft_adaptive": False}

        async def start(kind: str, number: int) -> None:
            engine = FakeEngine(blocks=512, step_s=0.001)
            await starts[kind](f"{kind}-{number}", engine, **decode if kind == "decode" else {})

        async def leave(kind: str, number: int) -> None:
            await rig.drain(f"{kind}-{number}")  # raises what it raised: a process would not end with 0
            await rig.kill(f"{kind}-{number}")

        for kind in starts:
            await asyncio.gather(*(start(kind, number) for number in (1, 2)))
        load = Load(rig.client())
        for kind in starts:
            for number in (1, 2):
                await start(kind, number + 2)
                await leave(kind, number)
                await load.another()
        await start("decode", 5)
        await load.another()
        for number in (3, 4):
            await leave("decode", number)
        await load.another()
        await load.end()
        assert set(rig.workers) == {"prefill-3", "prefill-4", "drafter-3", "drafter-4", "decode-5"}
        await rig.quiet()


async def test_case_124_the_last_worker_of_a_role_leaves_and_another_comes_later() -> None:
    """Streams that it cannot finish in time are handed back, and go on."""
    async with FleetRig() as rig:
        engine = FakeEngine(blocks=512, step_s=0.02)
        await rig.decode("decode-1", engine, drain_s=0.1, max_running=8)
        client = rig.client()
        tasks = [asyncio.create_task(consume(client.stream(token_ids=prompt(20, n), max_tokens=60))) for n in range(8)]
        await eventually(lambda: rig.workers["decode-1"].load().running == 8)
        await asyncio.sleep(0.3)
        started = time.monotonic()
        await rig.drain("decode-1")
        assert time.monotonic() - started < 0.1 + 2.0
        await rig.kill("decode-1")
        later = asyncio.create_task(ask(client, prompt(9), 3))
        await asyncio.sleep(0.2)
        assert not later.done()
        await rig.decode("decode-2", FakeEngine(blocks=512), max_running=9)
        for number, task in enumerate(tasks):
            answer = await task
            assert list(answer.token_ids) == completion(prompt(20, number), 60)
            assert (answer.attempts, answer.usage.completion_tokens) == (2, 60)
        await later
        stored = await rig.bus().read(SUBJECTS.event_stream, SUBJECTS.events(answer.id))
        events = [decode_event(message.data) for message in stored]
        assert [type(event) for event in events[-2:]] == [Tokens, Finished]
        assert sum(isinstance(event, Finished | Failed) for event in events) == 1
        await rig.quiet()
