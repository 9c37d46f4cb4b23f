"""Bytes that nobody should send, to every subject that anybody listens to, on a real server.

Cases 70, 126, 127 and 128: they are counted, nothing is run or allocated for them, and valid work is done as before.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import torch

from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.cache import frames, naming
from tests.block_faults import prompt
from tests.chaos.hostile import HUGE, targets
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL
from tests.nats_fleet import SUBJECTS, WAIT_S, NatsFleet
from trine.client import Client

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

LISTENED = {"req", "prefill", "claim", "drop", "again", "held", "hand", "draft", "cancel", "beat"}
"""The kinds of subjects of which some worker reads, and counts, every message."""
FLAT = 48 << 20
"""Bytes by which a process may have grown; what the messages say they hold is more by orders of magnitude."""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as running:
        yield running


class Touch:
    """Unpickling one makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._path}",)


def bombs(path: Path) -> list[bytes]:
    saved = io.BytesIO()
    torch.save({"x": Touch(path)}, saved)
    twice = b"\x82" + msgpack.packb("v") + b"\x01" + msgpack.packb("v") + b"\x01"
    return [
        pickle.dumps(Touch(path)),
        pickle.dumps(Touch(path), protocol=0),
        saved.getvalue(),
        msgpack.packb({"v": 1, "type": "beat", "role": pickle.dumps(Touch(path))}),
        msgpack.packb({"v": 99, "type": "generate", "id": "x"}),
        twice,
        b'{"v":1,"v":1,"type":"generate"}',
        b"[" * 100_000,
        b"\x81\xa1v" * 50_000,
        *HUGE,
    ]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bad(fleet: NatsFleet) -> int:
    """Messages that workers have counted as bad, under whatever name."""
    counters = [worker.beat().counters for worker in fleet.workers.values()]
    return sum(n for each in counters for name, n in each.items() if "bad" in name or "refused" in name)


async def right(client: Client, seed: int) -> None:
    tokens = prompt(40, seed)
    answer = await client.generate(token_ids=tokens, max_tokens=12)
    assert list(answer.token_ids) == completion(tokens, 12)


async def test_cases_70_126_and_128_bad_bytes_on_every_subject(server: EmbeddedNats, tmp_path: Path) -> None:
    touched = tmp_path / "pwned"
    async with NatsFleet(server.url) as fleet, Client(server.url, MODEL) as client:
        await fleet.decode(engine=FakeEngine(blocks=256))
        await fleet.prefill(engine=FakeEngine(blocks=256))
        await fleet.drafter()
        await right(client, 1)
        bus = await NatsBus.connect(server.url, name="hostile", wait=WAIT_S)
        before = resident()
        for target in targets(SUBJECTS, random.Random(1)):
            subject = target.replace("decode-2", "decode-1")
            known, sent = bad(fleet), bombs(touched)
            for data in sent:
                await bus.publish(subject, data)
            if subject.split(".")[2] in LISTENED:
                async with asyncio.timeout(WAIT_S):
                    while bad(fleet) < known + len(sent):
                        await asyncio.sleep(0.01)
        await right(client, 2)
        assert resident() - before < FLAT
        server.kill()
        await server.start_async()
        async with asyncio.timeout(WAIT_S):
            while not all(worker.bus.connected for worker in fleet.workers.values()):
                await asyncio.sleep(0.01)
        await right(client, 3)
        await bus.close()
    assert not touched.exists()


async def test_case_127_blocks_that_say_they_are_huge(server: EmbeddedNats) -> None:
    """Valid envelopes of blocks that a request asks for, with 10 bytes, other shapes, and bytes too many."""
    tokens = prompt(40, 7)
    engine = FakeEngine(blocks=256)
    root = naming.root(engine.identity, "default")
    metas = frames.metas(root, tokens, 4, "forger")
    async with NatsFleet(server.url) as fleet, Client(server.url, MODEL) as client:
        await fleet.decode(engine=engine)
        bus = await NatsBus.connect(server.url, name="hostile", wait=WAIT_S)
        before = resident()
        for place, meta in enumerate(metas):
            ((head, body),) = frames.encode(meta, memoryview(bytes(16)), engine.identity, frames.PART_BYTES)
            frame = head + bytes(body)
            huge = frames._head({**msgpack.unpackb(head[8:].rstrip(b"\0")), "block_bytes": 1 << 62, "length": 1 << 62})
            lies = [huge + bytes(10), head[:10], frame + bytes(1000), bytes([frame[0] ^ 0xFF]) + frame[1:]]
            await bus.append(SUBJECTS.block(meta.name, 0), lies[place % len(lies)])
        await asyncio.sleep(0.3)
        await right(client, 7)
        counters = fleet.workers["decode-1"].beat().counters
        assert sum(n for name, n in counters.items() if "reject" in name or "bad" in name) > 0, counters
        assert resident() - before < FLAT
        await bus.close()
