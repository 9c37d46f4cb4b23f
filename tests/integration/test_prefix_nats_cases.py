"""Failure cases of prefix caches met in the field that only a real nats-server shows, over whole fleets.

The engines' KV is the tokens themselves, so a wrong block gives a wrong text; it is repeated to make blocks large.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.cache.store import block_stream
from shared.errors import ConfigError, TooLarge
from tests.block_faults import ask, prompt
from tests.cache_rig import eventually
from tests.fleet_rig import MODEL
from tests.lying_server import free_port, nats_server
from tests.nats_fleet import SUBJECTS, NatsFleet, beat_when, stopped, worker_process
from tests.wide_engine import WideEngine
from trine.client import Client

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]
B = 4
MiB = 1 << 20


async def stored(bus: NatsBus, messages: int) -> None:
    """Wait until the cache's stream has so many messages."""
    async with asyncio.timeout(20):
        while (await bus.stream_state(SUBJECTS.block_stream)).messages < messages:
            await asyncio.sleep(0.01)


async def test_case_2_every_process_finds_what_another_stored() -> None:
    """Python's hashes differ from process to process; the names of blocks do not."""
    tokens, longer = prompt(10 * B + 1), [*prompt(10 * B), *prompt(4 * B + 1, seed=1)]
    engine = {"width": 4, "blocks": 64}
    with EmbeddedNats() as nats:
        async with Client(nats.url, MODEL) as client:
            bus = await NatsBus.connect(nats.url, name="test", wait=5)
            for seed in ("1", "2"):
                env = {"PYTHONHASHSEED": seed}
                with (
                    worker_process("prefill", nats.url, f"prefill-{seed}", engine=engine, env=env),
                    worker_process(
                        "decode", nats.url, f"decode-{seed}", engine=engine, env=env, local_prefill_tokens=0
                    ),
                ):
                    if seed == "1":
                        assert (await ask(client, tokens)).usage.cached_tokens == 0
                        await stored(bus, 10)
                    else:
                        answer = await ask(client, longer)
                        assert (answer.usage.cached_tokens, answer.served_by.prefill) == (10 * B, ["prefill-2"])
                        beat = await beat_when(bus, "prefill-2", lambda b: "jobs_done" in b.counters)
                        assert beat.counters["cache_hit"] == 10
            await bus.close()


@pytest.mark.parametrize("width", [2048, 2049, 4096, 20_000], ids=lambda w: f"{4 * B * w} bytes")
async def test_case_67_blocks_around_and_above_max_payload(width: int) -> None:
    """The server takes 65,536 bytes with headers. A connection that exceeds that is cut, with all its subscriptions."""
    tokens = prompt(6 * B + 1)
    with EmbeddedNats(max_payload=65_536) as nats:
        async with NatsFleet(nats.url) as rig, Client(nats.url, MODEL) as client:
            decode = await rig.decode("decode-1", WideEngine(width=width, blocks=32), local_prefill_tokens=0)
            prefill = await rig.prefill("prefill-1", WideEngine(width=width, blocks=32))
            cold = await ask(client, tokens)
            assert (cold.usage.cached_tokens, cold.served_by.prefill) == (0, ["prefill-1"])
            assert decode.bus.counters["reconnects"] == prefill.bus.counters["reconnects"] == 0
            await rig.kill("decode-1")
            decode = await rig.decode("decode-2", WideEngine(width=width, blocks=32))
            assert (await ask(client, tokens)).usage.cached_tokens == 6 * B
            with pytest.raises(TooLarge):
                await client.generate("1 " * 40_000)
            await ask(client, tokens)
            assert decode.bus.counters["reconnects"] == prefill.bus.counters["reconnects"] == 0


@pytest.mark.parametrize(
    ("blocks", "write_deadline", "frozen_s"),
    [(32, 1, 1.6), pytest.param(200, 10, 12.0, marks=pytest.mark.slow)],
    ids=["32 MB", "200 MB"],
)
async def test_case_68_a_decode_worker_frozen_while_blocks_flow(
    tmp_path: Path, blocks: int, write_deadline: int, frozen_s: float
) -> None:
    """The server cuts off whom it cannot write to for `write_deadline` seconds: what was on its way is lost.

    Only on a machine whose kernel keeps less for a socket than the 8 MB of a page; so this one does.
    """
    first, later = (prompt(blocks * B + 1, seed) for seed in (1, 2))
    wide = {"width": MiB // (4 * B), "blocks": 2 * blocks + 8, "context": 4 * blocks + 32}
    monitor = free_port()
    config = f'write_deadline: "{write_deadline}s", http: "127.0.0.1:{monitor}", max_payload: 8MB'
    with nats_server(tmp_path, config) as address:
        url = f"nats://{address}"
        async with NatsFleet(url) as rig, Client(url, MODEL) as client:
            bus = await NatsBus.connect(url, name="test", wait=5)
            await rig.decode("warmer", WideEngine(**wide))
            for tokens in (first, later):
                await ask(client, tokens, 1)
            await stored(bus, 2 * blocks)
            await rig.kill("warmer")
            with worker_process("decode", url, "frozen", engine=wide, freeze_after=9 * MiB) as worker:
                asking = asyncio.create_task(ask(client, first, 4))
                await eventually(lambda: stopped(worker), 10)
                await asyncio.sleep(frozen_s)
                worker.send_signal(signal.SIGCONT)
                woken = time.monotonic()
                answer = await asking
                assert time.monotonic() - woken < 8
                assert cut_off(monitor) == 1
                assert answer.usage.cached_tokens < blocks * B, "what was lost was computed"
                assert (await ask(client, later, 4)).usage.cached_tokens == blocks * B, "it reads again"
            await bus.close()


def cut_off(monitor: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{monitor}/varz", timeout=5) as answer:
        found: int = json.load(answer)["slow_consumers"]
        return found


async def test_case_72_memory_streams_are_lost_with_their_server_and_made_anew() -> None:
    old, running = prompt(10 * B + 1), [prompt(10 * B + 1, seed) for seed in range(1, 5)]
    with EmbeddedNats() as nats:
        async with NatsFleet(nats.url) as rig, Client(nats.url, MODEL) as client:
            await rig.decode("decode-1", WideEngine(width=64, blocks=256, step_s=0.02), ack_wait_s=2.0)
            await rig.prefill("prefill-1", WideEngine(width=64, blocks=256, step_s=0.02), ack_wait_s=2.0)
            await ask(client, old)
            tasks = [asyncio.create_task(ask(client, tokens, 60, deadline_ms=30_000)) for tokens in running]
            await asyncio.sleep(0.3)
            nats.kill()
            await asyncio.sleep(0.3)
            await nats.start_async()
            await asyncio.gather(*tasks)
            await rig.kill("decode-1")
            bus = await NatsBus.connect(nats.url, name="test", wait=5)
            async with asyncio.timeout(5):
                while await bus.stream_of(SUBJECTS.blocks) is None:
                    await asyncio.sleep(0.02)
            await bus.purge(SUBJECTS.block_stream, SUBJECTS.blocks)  # what was stored since
            for name, cached in (("decode-2", 0), ("decode-3", 10 * B)):
                await rig.decode(name, WideEngine(width=64, blocks=256), ack_wait_s=2.0)
                assert (await ask(client, old)).usage.cached_tokens == cached
                await stored(bus, 10)
                await rig.kill(name)
            await bus.close()


async def test_case_74_a_server_with_less_memory_than_the_streams_stops_the_start() -> None:
    with EmbeddedNats(max_memory_store=512 * MiB) as nats:
        async with NatsFleet(nats.url) as rig:
            for start in (rig.decode, rig.prefill):
                with pytest.raises(ConfigError, match="too little room") as caught:
                    await start("worker", WideEngine(width=64))
                assert SUBJECTS.block_stream in caught.value.message
                for said in (str(1024 * MiB), "max_memory_store", "TRINE_CACHE_BYTES"):
                    assert said in caught.value.message


async def test_case_74_a_cache_that_would_refuse_when_full_is_named_at_start() -> None:
    with EmbeddedNats() as nats:
        bus = await NatsBus.connect(nats.url, name="test", wait=5)
        await bus.ensure_stream(replace(block_stream(SUBJECTS, 1024 * MiB), discard="new"))
        async with NatsFleet(nats.url) as rig:
            with pytest.raises(ConfigError, match="discard"):
                await rig.decode("worker", WideEngine(width=64))
        await bus.close()


async def test_case_74_a_full_stream_evicts_and_everybody_is_answered() -> None:
    """Room for about 15 blocks of 64 KiB; prompts of 12 blocks, by turns, on workers that can keep one of them."""
    prompts = [prompt(12 * B + 1, seed) for seed in range(3)]
    with EmbeddedNats() as nats:
        async with NatsFleet(nats.url) as rig, Client(nats.url, MODEL) as client:
            for name in ("decode-1", "decode-2"):
                await rig.decode(name, WideEngine(width=4096, blocks=16), cache_bytes=MiB, max_running=1)
            for _ in range(4):
                await asyncio.gather(*(ask(client, tokens, 3) for tokens in prompts))
            bus = await NatsBus.connect(nats.url, name="test", wait=5)
            await eventually(lambda: not any(w.load().running for w in rig.workers.values()))
            state = await bus.stream_state(SUBJECTS.block_stream)
            assert 0 < state.bytes <= MiB and state.first_seq > 12
            await bus.close()
