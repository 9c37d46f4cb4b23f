"""Failure cases of prefix caches met in the field, at the level of a whole fleet: what a client is answered.

The engines' KV is the tokens themselves, so a wrong block gives a wrong text. What the cache alone does in these cases
is tested in `test_prefix_cache_cases`; what needs a real server or a real model, in tests/integration and tests/e2e.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from shared.cache.index import PrefixIndex
from shared.engine.span import Span
from shared.errors import InvalidField, StreamFull
from shared.subjects import Subjects
from tests.block_faults import SUBJECTS, BlockFaults, FaultyFleet, ask, damages, prompt, refusal, subjects_of
from tests.fake_engine import FakeEngine
from tests.fleet_rig import joins_unheard
from tests.wide_engine import WideEngine

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
B = 4


def _cut(name: bytes) -> bytes:
    return name[:1] * len(name)


async def test_case_1_keys_that_collide_are_told_apart_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared cache's keys cut to 8 bits: almost every block that is found is another prompt's."""
    spell = Subjects.block
    monkeypatch.setattr(Subjects, "block", lambda self, name, *a, **k: spell(self, _cut(name), *a, **k))
    for method in ("present", "sequence", "forget"):
        real = getattr(PrefixIndex, method)
        monkeypatch.setattr(PrefixIndex, method, lambda self, name, real=real: real(self, _cut(name)))
    async with FaultyFleet() as rig:
        for name in ("decode-1", "decode-2"):  # with pools so small that what comes again has to come from the cache
            await rig.decode(name, FakeEngine(blocks=24), max_running=4)
        client = rig.client()
        prompts = [prompt(4 * B + 1, seed) for seed in range(100)]
        for _ in range(2):
            for start in range(0, len(prompts), 5):
                await asyncio.gather(*(ask(client, p, 3) for p in prompts[start : start + 5]))
        assert sum(rig.count(name, "cache_reject") for name in rig.workers) > 100


@pytest.mark.parametrize(
    "changed",
    [{"fingerprint": "other", "weights": 4096}, {"codec": "int8"}, {"block_size": 8}],
    ids=["weights", "codec", "block size"],
)
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_cases_6_7_63_what_was_made_otherwise_is_never_used(
    changed: dict[str, Any], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm, then one role comes back with other weights, KV type or block size under the same name of the model."""
    joins_unheard(monkeypatch)
    tokens = prompt(61)
    other, weights = FakeEngine(blocks=128, **changed), changed.get("weights", 0) if role == "decode" else 0
    async with FaultyFleet() as rig:
        await rig.decode("decode-1", local_prefill_tokens=0)
        await rig.prefill("prefill-1")
        await ask(rig.client(), tokens)
        await rig.stored(15)
        await rig.kill("decode-1")
        with capture_logs() as logs:
            if role == "prefill":
                await rig.kill("prefill-1")
                await rig.prefill("prefill-2", other)
            await rig.decode("decode-2", other if role == "decode" else None, local_prefill_tokens=0)
            answer = await ask(rig.client(), tokens, weights=weights)
            longer = await ask(rig.client(), tokens + prompt(40, 1), weights=weights)
        assert answer.usage.cached_tokens == (0 if role == "decode" else 60)
        assert longer.served_by.prefill == []
        told = [entry["differs"] for entry in logs if entry["event"] == "not pairing with a peer that differs"]
        wanted = next(iter(changed))
        assert told and all(any(said.startswith(wanted) for said in differs) for differs in told)


@pytest.mark.parametrize("blocks", [2, 3, 5])
async def test_case_8_a_prompt_that_is_cached_whole_keeps_a_token_to_compute(blocks: int) -> None:
    """Three times on one worker, then three times on one that has it from the shared cache."""
    tokens = prompt(blocks * B)
    async with FaultyFleet() as rig:
        for worker in ("decode-1", "decode-2"):
            await rig.decode(worker)
            cached = [(await ask(rig.client(), tokens)).usage.cached_tokens for _ in range(3)]
            warm = (blocks - 1) * B
            assert cached == [0 if worker == "decode-1" else warm, warm, warm]
            await rig.stored(blocks)
            await rig.kill(worker)


async def test_case_9_lengths_around_the_edges_of_blocks() -> None:
    """Cold, warm from the pool, warm from the shared cache; with answers that end before, on and after an edge."""
    lengths = (1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1)
    async with FaultyFleet() as rig:
        await rig.decode("decode-1", local_prefill_tokens=0)
        await rig.prefill("prefill-1")
        for length in lengths:
            for count in (1, B - 1, B, B + 1):
                tokens = prompt(length, seed=10 * length + count)
                cold = await ask(rig.client(), tokens, count)
                warm = await ask(rig.client(), tokens, count)
                assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, (length - 1) // B * B)
        await asyncio.sleep(0.1)
        await rig.kill("decode-1")
        await rig.decode("decode-2", local_prefill_tokens=0)
        for length in lengths:
            for count in (1, B - 1, B, B + 1):
                answer = await ask(rig.client(), prompt(length, seed=10 * length + count), count)
                assert answer.usage.cached_tokens == (length - 1) // B * B


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs", "echo"])
async def test_case_10_what_needs_logits_of_cached_tokens_is_refused_cold_and_warm(field: str) -> None:
    more: Any = {field: 1}
    async with FaultyFleet() as rig:
        await rig.decode()
        for _ in range(2):
            refused = await refusal(rig, f'"prompt":"1 2 3 4 5 6 7 8 9","max_tokens":1,"{field}":1')
            assert (refused.code, refused.field) == ("invalid_field", field)
            with pytest.raises(InvalidField) as caught:
                await rig.client().generate(token_ids=range(1, 10), **more)
            assert caught.value.field == field
            await ask(rig.client(), list(range(1, 10)), 1)


async def test_case_11_a_block_is_used_by_others_only_when_it_is_computed() -> None:
    """Two requests for the same 16 cold blocks, 0 to 20 ms apart, while blocks are stored one by one."""
    async with FaultyFleet() as rig:
        rig.faults.write_s = 0.002
        for name in ("decode-1", "decode-2"):
            await rig.decode(name, FakeEngine(blocks=128, step_s=0.001), local_prefill_tokens=0, max_running=2)
        await rig.prefill(engine=FakeEngine(blocks=128, step_s=0.002))
        client = rig.client()

        async def later(seconds: float, tokens: list[int]) -> None:
            await asyncio.sleep(seconds)
            await ask(client, tokens, 3)

        for round_ in range(50):
            tokens = prompt(16 * B + 1, seed=round_)
            await asyncio.gather(later(0, tokens), later(round_ % 11 * 0.002, tokens))


@pytest.mark.parametrize("hole", [2, 0])
async def test_case_13_blocks_behind_a_hole_are_not_used(hole: int) -> None:
    tokens = prompt(6 * B + 1)
    async with FaultyFleet() as rig:
        await rig.warm(tokens)
        await rig.decode("decode-2")  # it is told of all six
        rig.cache.remove(rig.cache.last_of(subjects_of(rig.engines["decode-2"].identity, tokens)[hole]))
        answer = await ask(rig.client(), tokens)
        assert answer.usage.cached_tokens == hole * B
        await rig.stored(6)  # the hole is mended
        await rig.kill("decode-2")
        await rig.decode("decode-3")
        assert (await ask(rig.client(), tokens)).usage.cached_tokens == 6 * B


async def test_case_14_what_is_evicted_while_it_is_read_is_computed() -> None:
    """A stream for 1.2 prompts, three prompts at once again and again, each block delayed."""
    width, blocks = 4096, 13  # 64 KiB a block, 13 blocks a prompt; the smallest stream is 1 MiB
    async with FaultyFleet() as rig:
        rig.faults.write_s, rig.faults.read_s = 0.001, 0.002
        for role, name in ((rig.decode, "decode-1"), (rig.decode, "decode-2"), (rig.prefill, "prefill-1")):
            engine = WideEngine(width=width, blocks=blocks + 5)  # too small a pool to keep both
            await role(name, engine, local_prefill_tokens=0, cache_bytes=1 << 20, prefill_patience_s=0.3, max_running=1)
        client, rng = rig.client(), random.Random(5)

        async def again_and_again(seed: int) -> None:
            for _ in range(5):
                await ask(client, prompt(blocks * B + 1, seed), 3)
                await asyncio.sleep(rng.random() * 0.02)

        await asyncio.gather(*(again_and_again(seed) for seed in (1, 2, 3)))
        counts = {name: sum(rig.count(w, f"cache_{name}") for w in rig.workers) for name in ("hit", "miss", "reject")}
        assert counts["hit"] > 0 and counts["miss"] > 0 and counts["reject"] == 0
        assert rig.cache.state().bytes <= 1 << 20
        assert rig.cache.state().last_seq > 3 * blocks, "what was evicted was stored again"


async def test_case_17_a_flushed_cache_is_not_waited_for() -> None:
    tokens = prompt(20 * B + 1)
    async with FaultyFleet() as rig:
        await rig.warm(tokens)
        await rig.decode("decode-2")
        for subject in subjects_of(rig.engines["decode-2"].identity, tokens)[12:]:
            rig.cache.remove(rig.cache.last_of(subject))
        assert await _timed(rig, tokens) == 12 * B, "what is left of it is used"
        await rig.kill("decode-2")
        await rig.decode("decode-3")
        rig.cache.purge(SUBJECTS.blocks)
        assert await _timed(rig, tokens) == 0
        rig.cache.purge(SUBJECTS.blocks)
        assert await _timed(rig, tokens) == 20 * B, "its own pool is not the cache"


async def test_case_17_the_holder_is_killed_before_all_its_blocks_are_stored() -> None:
    tokens = prompt(20 * B + 1)
    async with FaultyFleet() as rig:
        await rig.decode("decode-1")
        rig.faults.write_s = 0.03
        await ask(rig.client(), tokens)
        rig.faults.refuse = lambda: StreamFull("no more")
        await asyncio.sleep(0.1)
        await rig.kill("decode-1")
        rig.faults.write_s, rig.faults.refuse = 0.0, None
        await rig.decode("decode-1")  # empty, under the same name
        there = rig.cache.state().messages
        assert there < 20
        assert await _timed(rig, tokens) == there * B


async def _timed(rig: FaultyFleet, tokens: list[int]) -> int:
    """Cached tokens of an answer that nothing holds up."""
    started = time.monotonic()
    answer = await ask(rig.client(), tokens)
    assert time.monotonic() - started < 1.5
    return answer.usage.cached_tokens


@pytest.mark.parametrize("prefill", [False, True], ids=["alone", "with prefill"])
async def test_case_18_cached_tokens_are_those_that_were_there_before(prefill: bool) -> None:
    async with FaultyFleet() as rig:
        await rig.decode(local_prefill_tokens=0)
        if prefill:
            await rig.prefill()
        client = rig.client()

        async def streamed(token_ids: list[int]) -> int:
            async with client.stream(token_ids=token_ids, max_tokens=5) as stream:
                async for _ in stream:
                    pass
            return stream.completion.usage.cached_tokens

        async def whole(token_ids: list[int]) -> int:
            return (await ask(client, token_ids)).usage.cached_tokens

        for length in (30, 32, 33):
            for seed, modes in enumerate(((streamed, whole, streamed), (whole, streamed, whole))):
                tokens = prompt(length, seed=100 * length + seed)
                warm = (length - 1) // B * B
                assert [await mode(tokens) for mode in modes] == [0, warm, warm]


@pytest.mark.parametrize("fault", ["flipped", "truncated", "dropped", "swapped"])
@pytest.mark.parametrize("path", ["warm", "remote"])
async def test_case_58_a_faulty_block_never_changes_the_text(fault: str, path: str) -> None:
    """On the way from the cache to a worker that is new, and from the prefill worker that computes it."""
    tokens = prompt(12 * B + 1)
    async with FaultyFleet() as rig:
        identity = FakeEngine(blocks=128).identity
        victims = subjects_of(identity, tokens)[5:7]
        if path == "warm":
            await rig.warm(tokens)
        else:
            await rig.prefill()
        await rig.decode("decode-1", local_prefill_tokens=0 if path == "remote" else 99, prefill_patience_s=0.3)
        rig.faults.damage = damages(rig.cache, victims)[fault]
        answer = await ask(rig.client(), tokens)
        assert answer.usage.cached_tokens == (5 * B if path == "warm" else 0)
        assert rig.count("decode-1", "cache_miss") >= 1
        rejects = {"dropped": 0, "swapped": 2}.get(fault, 1)
        assert rig.count("decode-1", "cache_reject") >= rejects
        assert (rig.count("decode-1", "cache_reject") == 0) == (rejects == 0)


async def test_case_58_blocks_that_come_too_late_are_computed() -> None:
    tokens = prompt(12 * B + 1)
    async with FaultyFleet() as rig:
        rig.faults.write_s = 0.5
        await rig.decode(local_prefill_tokens=0, prefill_patience_s=0.2)
        await rig.prefill()
        started = time.monotonic()
        await ask(rig.client(), tokens)
        assert time.monotonic() - started < 2.0
        assert rig.workers["decode-1"].counters["prefill_given_up"] == 1


@pytest.mark.parametrize("phase", [0.02, 0.12, 0.22])
async def test_case_62_a_late_block_is_not_written_into_the_next_request(phase: float) -> None:
    """A pool for one request; the first is cancelled while its blocks are on their way, the second comes at once."""
    first, second = prompt(10 * B + 1, seed=1), prompt(10 * B + 1, seed=2)
    async with FaultyFleet() as rig:
        await rig.warm(first)
        await rig.decode("decode-1", FakeEngine(blocks=12, step_s=0.05))
        rig.faults.read_s = 0.03
        cancelled = asyncio.create_task(rig.client().generate(token_ids=first, max_tokens=3, id="first"))
        await _until(lambda: rig.faults.reading > 0)
        await asyncio.sleep(phase)
        await rig.client().cancel("first")
        await ask(rig.client(), second, 6)
        assert (await cancelled).finish_reason == "cancelled"
        await ask(rig.client(), first, 3)
        await rig.quiet()


class Lingering(FakeEngine):
    """What a step writes lies in the pool for a while before anybody reads it."""

    def step(self, spans: Sequence[Span]) -> list[list[int]]:
        out = super().step(spans)
        time.sleep(0.1)
        return out


@pytest.mark.parametrize("phase", [0.02, 0.12, 0.22])
async def test_case_62_in_a_prefill_worker_too(phase: float) -> None:
    first, second = prompt(10 * B + 1, seed=1), prompt(10 * B + 1, seed=2)
    async with FaultyFleet() as rig:
        await rig.warm(first)
        slow = rig.faults_of["prefill-1"] = BlockFaults(read_s=0.03)
        await rig.prefill(engine=Lingering(blocks=12))
        await rig.decode("decode-1", local_prefill_tokens=0, prefill_patience_s=5.0)
        rig.faults.damage = lambda m: None  # decode gets nothing from the cache, and asks for a job
        cancelled = asyncio.create_task(rig.client().generate(token_ids=first, max_tokens=3, id="first"))
        await _until(lambda: slow.reading > 0)
        rig.faults.damage = None
        await asyncio.sleep(phase)
        await rig.client().cancel("first")
        answer = await ask(rig.client(), second, 6)
        assert answer.served_by.prefill == ["prefill-1"]
        assert (await cancelled).finish_reason == "cancelled"


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def test_case_74_a_cache_that_takes_nothing_only_misses() -> None:
    tokens = prompt(12 * B + 1)
    async with FaultyFleet() as rig:
        rig.faults = BlockFaults(refuse=lambda: StreamFull("full"))
        await rig.decode("decode-1", local_prefill_tokens=0, prefill_patience_s=0.2)
        await rig.prefill()
        assert (await ask(rig.client(), tokens)).usage.cached_tokens == 0
        assert (await ask(rig.client(), tokens)).usage.cached_tokens == 12 * B, "from its own pool"
        await rig.kill("decode-1")
        await rig.decode("decode-2")
        assert (await ask(rig.client(), tokens)).usage.cached_tokens == 0
