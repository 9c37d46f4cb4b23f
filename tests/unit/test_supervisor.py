"""The fleet with real processes, small stand-ins for workers, and a real nats-server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import ConfigError, Unavailable
from trine.process import worker_env
from trine.supervisor import Fleet

ROOT = Path(__file__).resolve().parents[2]

# Beats like a worker and does what TEST_ACT says. Stands in for `python -m services.<role>`.
WORKER = """
import asyncio, os, signal, sys, time
from shared.bus.nats import NatsBus
from shared.codec import encode
from shared.messages import Beat
from shared.subjects import Subjects

act = os.environ.get("TEST_ACT", "")
name = os.environ["TRINE_WORKER"]
print("hello from " + name, flush=True)
if act == "refuse":
    print("cannot start: kv blocks differ", flush=True)
    sys.exit(2)
if act == "crash":
    sys.exit(1)
if act == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

async def main():
    bus = await NatsBus.connect(os.environ["TRINE_NATS_URL"], name=name, wait=5)
    role = name.split("-")[0]
    while True:
        beat = Beat(role=role, worker=name, draining=act == "draining")
        await bus.publish(Subjects("fake").beat(role, name), encode(beat))
        await asyncio.sleep(0.1)

asyncio.run(main())
"""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children run WORKER instead of a service."""
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    original = sys.modules["trine.process"].python

    def python(*arguments: str) -> list[str]:
        if arguments[-1] == "services.gateway":
            return original(*arguments)
        return [*original()[:-1], "-P", str(script)]

    monkeypatch.setattr("trine.process.python", python)


def fleet(act: str = "", **counts: int) -> Fleet:
    return Fleet(counts or {"prefill": 1, "decode": 2}, env={"TRINE_MODEL_NAME": "fake", "TEST_ACT": act})


def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_all_start_are_named_and_end_with_the_fleet(workers: None) -> None:
    with fleet() as running:
        assert set(running.pids()) == {"prefill-1", "decode-1", "decode-2"}
        seen: list[dict[str, int]] = []
        running.wait_ready(20, lambda counts: seen.append(dict(counts)))
        assert seen[-1] == {"prefill": 1, "decode": 2}
        pids = [*running.pids().values(), (running.nats and running.nats.pid) or 0]
        assert all(alive(pid) for pid in pids)
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert not any(alive(pid) for pid in pids)
    assert running.failure is None


def test_a_killed_worker_comes_back_and_the_others_stay(workers: None) -> None:
    with fleet() as running:
        before = running.pids()
        running.kill("decode-1")
        until(lambda: running.pids().get("decode-1", before["decode-1"]) != before["decode-1"])
        after = running.pids()
        assert {name: pid for name, pid in after.items() if name != "decode-1"} == {
            name: pid for name, pid in before.items() if name != "decode-1"
        }
        assert running.restarts() == {"prefill-1": 0, "decode-1": 1, "decode-2": 0}
        running.wait_ready(20)


def test_a_held_worker_stays_away_until_released(workers: None) -> None:
    with fleet(decode=1) as running:
        running.hold("decode-1")
        running.kill("decode-1")
        until(lambda: not running.pids())
        time.sleep(1.0)
        assert not running.pids()
        with pytest.raises(Unavailable, match="does not run"):
            running.kill("decode-1")
        running.release("decode-1")
        until(lambda: "decode-1" in running.pids())


def test_a_killed_nats_server_comes_back_on_its_port(workers: None) -> None:
    with fleet(decode=1) as running:
        running.wait_ready(20)
        url = running.url
        assert running.nats is not None
        os.kill(running.nats.pid or 0, signal.SIGKILL)
        until(lambda: bool(running.nats and running.nats.running))
        assert running.url == url
        running.wait_ready(20)


def test_a_refused_configuration_ends_the_fleet_with_the_reason(workers: None) -> None:
    with fleet("refuse", decode=1) as running:
        with pytest.raises(Unavailable, match=r"(?s)decode-1 refuses its configuration.*kv blocks differ"):
            running.wait_ready(60)
        with pytest.raises(Unavailable, match="kv blocks differ"):
            running.wait()
        assert running.restarts() == {"decode-1": 2}


def test_a_crashing_worker_is_tried_again_and_named_when_it_is_late(workers: None) -> None:
    with fleet("crash", decode=1) as running:
        until(lambda: running.restarts()["decode-1"] >= 2)
        with pytest.raises(Unavailable, match=r"(?s)waiting for 1 decode.*decode-1: hello from decode-1"):
            running.wait_ready(1)
        assert running.failure is None


def test_a_draining_worker_does_not_count_as_ready(workers: None) -> None:
    with fleet("draining", decode=1) as running, pytest.raises(Unavailable, match="1 decode"):
        running.wait_ready(2)


def test_one_that_ignores_sigterm_is_killed_in_time(workers: None) -> None:
    with fleet("stubborn", decode=1) as running:
        running.wait_ready(20)
        pid = running.pids()["decode-1"]
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert not alive(pid)


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import time; time.sleep(60)")
    parent = tmp_path / "parent.py"
    parent.write_text(
        textwrap.dedent(f"""
            import time, trine.process
            original = trine.process.python
            trine.process.python = lambda *_: [*original()[:-1], "-P", {str(script)!r}]
            from trine.supervisor import Fleet
            fleet = Fleet({{"decode": 1}})
            fleet.start()
            print(fleet.pids()["decode-1"], fleet.nats.pid, flush=True)
            time.sleep(60)
        """)
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        until(lambda: "execv" not in Path(f"/proc/{pids[0]}/cmdline").read_text())  # it has become the worker
        assert all(alive(pid) for pid in pids)
        process.kill()
    until(lambda: not any(alive(pid) for pid in pids), 5)


def test_workers_share_the_cores_unless_somebody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINE_THREADS", raising=False)
    env = worker_env("decode-1", "nats://x", "decode", {"TRINE_BLOCK_SIZE": "8"})
    assert env["TRINE_THREADS"] == "0" and "OMP_NUM_THREADS" not in env
    assert (env["TRINE_WORKER"], env["TRINE_NATS_URL"], env["TRINE_BLOCK_SIZE"]) == ("decode-1", "nats://x", "8")
    assert worker_env("w", "u", "drafter", {})["OMP_NUM_THREADS"] == "1"
    assert worker_env("w", "u", "decode", {"TRINE_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("TRINE_THREADS", "5")
    assert worker_env("w", "u", "drafter", {})["TRINE_THREADS"] == "5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"counts": {"encode": 1}}, "no such role: encode"),
        ({"counts": {"gateway": 2}, "env": {"TRINE_PORT": "65535"}}, "no port with room for 2"),
        ({"counts": {"decode": 1}, "nats": "embedded:x"}, "'x' is no port"),
        ({"counts": {"decode": 1}, "env": {"TRINE_BLOCK_SIZE": "0"}}, "TRINE_BLOCK_SIZE"),
        ({"counts": {"decode": 1}, "env": {"TRINE_DRAFT_DEPTH": "many"}}, "TRINE_DRAFT_DEPTH"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fleet(**arguments)


def test_a_taken_port_is_said_at_once(workers: None) -> None:
    with fleet(decode=0) as running:
        port = running.url.rsplit(":", 1)[1]
        with pytest.raises(Unavailable, match="address already in use"):
            Fleet({"decode": 1}, nats=f"embedded:{port}").start()


def test_gateways_have_ports_of_their_own_and_come_back(workers: None) -> None:
    env = {"TRINE_MODEL_NAME": "fake", "TRINE_PORT": str(two_free_ports())}
    with Fleet({"decode": 1, "gateway": 2}, env=env) as running:
        running.wait_ready(30)
        assert len(set(running.gateways)) == 2 and set(running.pids()) == {"decode-1", "gateway-1", "gateway-2"}
        for url in running.gateways:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
                assert json.load(response)["data"][0]["id"] == "fake"
        killed = running.kill("gateway-1")
        until(lambda: running.pids().get("gateway-1", killed) != killed)
        running.wait_ready(30)
        assert running.restarts()["gateway-1"] == 1
        with pytest.raises(ConfigError, match=r"cannot listen on .* another --port, or --gateway 0"):
            Fleet({"gateway": 1}, env=env)


def two_free_ports() -> int:
    """The first of them."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port
