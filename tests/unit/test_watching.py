"""`trine status`, `top`, `models`, `chat` and `generate` as processes, before a real nats-server and a fake worker."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
from collections.abc import AsyncIterator

import pytest
from typer.testing import CliRunner

from shared.bus.base import Bus
from shared.bus.embedded import EmbeddedNats
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.nats import NatsBus
from shared.config import Settings
from shared.errors import PermissionDenied, Unavailable
from shared.streams import request_stream
from shared.subjects import Subjects
from tests.commands import run, start
from tests.fakes import FakeDecode
from trine.attended import somebody
from trine.cli import app
from trine.status import listening, stream_rows


@pytest.fixture(scope="module")
async def fake() -> AsyncIterator[FakeDecode]:
    with EmbeddedNats() as server:
        bus = await NatsBus.connect(server.url, name="fake", wait=5)
        async with FakeDecode(bus) as fake:
            fake.url = server.url  # type: ignore[attr-defined]
            yield fake
        await bus.close()


def at(fake: FakeDecode) -> list[str]:
    return ["--nats", fake.url]  # type: ignore[attr-defined]


@pytest.mark.anyio
async def test_status_models_and_one_frame_of_top(fake: FakeDecode) -> None:
    told, listed, top = await asyncio.gather(
        run("status", *at(fake), "--model", "fake", "--json"), run("models", *at(fake)), run("top", *at(fake))
    )
    found = json.loads(told.out)
    (model,) = found["models"]
    assert (model["model"], model["served"], model["workers"][0]["worker"]) == ("fake", True, "decode-1")
    assert {"requests", "events"} <= {row["stream"] for row in found["streams"]}
    assert found["guarded"] is False
    assert listed.out.splitlines()[1].split()[:2] == ["fake", "yes"]
    assert "decode-1" in top.out and "\x1b" not in top.out
    assert [told.code, listed.code, top.code] == [0, 0, 0]


@pytest.mark.anyio
async def test_a_chat_takes_turns(fake: FakeDecode) -> None:
    lines = "one two\n/system Be brief.\nthree\n\n/stats\n/quit\nnever asked\n"
    done = await run("chat", *at(fake), "--model", "fake", "--temperature", "0", stdin=lines)
    assert done.code == 0
    first, second = fake.requests[-2:]
    assert done.out == "one two\n" + "".join(m.content or "" for m in second.messages or ()) + "\n"
    assert [m.content for m in first.messages or ()] == ["one two"]
    assert [(m.role, m.content) for m in second.messages or ()] == [
        ("system", "Be brief."),
        ("user", "one two"),
        ("assistant", "one two"),
        ("user", "three"),
    ]
    assert second.temperature == 0
    assert "prompt tokens cached" in done.err


@pytest.mark.anyio
async def test_at_a_terminal_ctrl_c_stops_an_answer_and_no_more(fake: FakeDecode) -> None:
    fake._pause = 0.1
    mine, its = pty.openpty()
    process = await start("chat", *at(fake), "--model", "fake", terminal=its)
    os.close(its)
    seen = bytearray()
    asyncio.get_running_loop().add_reader(mine, lambda: seen.extend(_some(mine)))
    try:
        await _until(seen, b"> ")
        os.write(mine, b"word " * 99 + b"\n")
        await _until(seen, b"\nword word")
        process.send_signal(signal.SIGINT)
        await _until(seen, b"[stopped]")
        assert fake.requests[-1].id in fake.cancelled
        fake._pause = 0.0
        del seen[:]
        os.write(mine, b"last\n")
        await _until(seen, b"> ")
        assert [m.role for m in fake.requests[-1].messages or ()] == ["user", "assistant", "user"]
        os.write(mine, b"/quit\n")
        async with asyncio.timeout(30):
            assert await process.wait() == 0
    finally:
        asyncio.get_running_loop().remove_reader(mine)
        os.close(mine)


def _some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""


async def _until(seen: bytearray, text: bytes) -> None:
    async with asyncio.timeout(30):
        while text not in seen:
            await asyncio.sleep(0.02)


@pytest.mark.anyio
async def test_when_nobody_is_there_to_answer_it_says_who_is(fake: FakeDecode) -> None:
    await fake.bus.ensure_stream(request_stream(Subjects("gone"), Settings()))
    done = await run("generate", "hi", *at(fake), "--model", "gone", "--timeout", "60")
    assert (done.code, done.out) == (1, "")
    assert done.err == "trine: no decode worker for model 'gone'; running: fake\n"


class Deaf(MemoryBus):
    """A tenant's connection: it may neither hear beats nor ask about streams."""

    async def subscribe(self, *_: object, **__: object):
        raise PermissionDenied("not allowed to subscribe")

    async def stream_state(self, stream: str):
        raise PermissionDenied("not allowed to ask")


@pytest.mark.anyio
async def test_without_the_right_to_listen_nothing_is_held_against_the_fleet() -> None:
    bus: Bus = Deaf(MemoryBroker())
    await somebody(bus, "any")
    assert await stream_rows(bus, ["any"]) is None
    with pytest.raises(PermissionDenied, match="TRINE_NATS_USER=operator"):
        async with listening(bus):
            pass


def test_shell_completion_knows_the_commands() -> None:
    asked = {"_TRINE_COMPLETE": "complete_bash", "COMP_WORDS": "trine sta", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], prog_name="trine", env=asked).output.split() == ["status"]
    asked = {"_TRINE_COMPLETE": "complete_bash", "COMP_WORDS": "trine chat --priority n", "COMP_CWORD": "3"}
    assert CliRunner().invoke(app, [], prog_name="trine", env=asked).output.split() == ["normal"]


@pytest.mark.anyio
async def test_silence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trine.attended.HEARD_S", 0.05)
    with pytest.raises(Unavailable, match="running: none; start one with `trine up`"):
        await somebody(MemoryBus(MemoryBroker()), "any")
