"""compose.yaml for real: build the image, start the fleet, talk to it over plain NATS from the host, scale it.

`COMPOSE` names the compose command (default: `docker compose`, and a skip where no engine answers). The project
gets a name and a port of its own, so that a fleet that already runs here is left alone. Only what a client of any
language would use is used: subjects, JSON, nats-py.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest
from anyio import to_thread
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import NoStreamResponseError

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m-instruct"
PROMPT = (
    "The lighthouse keeper wrote in his log every evening. He noted the wind, the height of the waves, the ships "
    "that passed and the birds that rested on the rail. In winter the nights were long, and he wrote more. "
) * 8 + "\n\nIn one sentence, the log of the next evening says:"
BEATS = 3  # by the third beat of a worker its peers know it
BUILD_S = 1500.0
START_S = 600.0
ANSWER_S = 300.0

pytestmark = [pytest.mark.compose, pytest.mark.anyio, pytest.mark.timeout(BUILD_S + START_S + ANSWER_S)]


@dataclass(frozen=True)
class Fleet:
    command: list[str]
    port: int

    def compose(self, *arguments: str, timeout: float = 120.0) -> str:
        """Run one compose command; its output. Fails the test, showing the output, when the command fails."""
        env = {**os.environ, "COMPOSE_PROJECT_NAME": f"trinetest{os.getpid()}", "NATS_PORT": str(self.port)}
        done = subprocess.run(
            [*self.command, *arguments],
            check=False,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            pytest.fail(f"compose {' '.join(arguments)}: exit {done.returncode}\n{done.stdout[-8000:]}")
        return done.stdout

    async def connect(self) -> Client:
        """A connection to the published port, once the server answers."""
        with anyio.fail_after(60):
            while True:
                try:
                    return await nats.connect(f"nats://127.0.0.1:{self.port}", allow_reconnect=False)
                except (NatsError, OSError):
                    await anyio.sleep(0.5)


def compose_command() -> list[str]:
    """The compose command of this machine; skips when none was named and no Docker engine answers."""
    if named := os.environ.get("COMPOSE"):
        return shlex.split(named)
    if not shutil.which("docker"):
        pytest.skip("no `docker` command here; install Docker, or name a compose command in COMPOSE")
    for probe in (["docker", "compose", "version"], ["docker", "info"]):
        done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            pytest.skip(f"`{' '.join(probe)}` fails: {done.stderr.strip()[:200]}")
    return ["docker", "compose"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    fleet = Fleet(compose_command(), free_port())
    failed = request.session.testsfailed
    try:
        fleet.compose("up", "--build", "-d", timeout=BUILD_S)
        yield fleet
        if request.session.testsfailed > failed:
            sys.stderr.write(fleet.compose("logs")[-20000:])
    finally:
        fleet.compose("down", "--remove-orphans", timeout=180.0)  # replicas first: they may hold the broker
        fleet.compose("down", "-v", timeout=180.0)


async def workers(client: Client, **wanted: int) -> dict[str, set[str]]:
    """Names of the live workers by role, once as many of each as wanted have been heard often enough by all."""
    heard: dict[str, Counter[str]] = {role: Counter() for role in wanted}
    beats = await client.subscribe(f"trine.{MODEL}.beat.*.*")
    with anyio.fail_after(START_S):
        while any(sum(n >= BEATS for n in heard[role].values()) < count for role, count in wanted.items()):
            _, _, _, role, worker = (await beats.next_msg(timeout=START_S)).subject.split(".")
            heard.setdefault(role, Counter())[worker] += 1
    await beats.unsubscribe()
    return {role: set(counts) for role, counts in heard.items()}


async def submit(client: Client, request: dict[str, Any]) -> None:
    """Publish and wait for the broker's receipt; the queue exists as soon as one decode worker has started."""
    with anyio.fail_after(START_S):
        while True:
            try:
                await client.jetstream().publish(f"trine.{MODEL}.req.normal", json.dumps(request).encode())
                return
            except NoStreamResponseError:
                await anyio.sleep(0.5)


async def ask(client: Client, prompt: str, max_tokens: int = 12) -> tuple[str, dict[str, Any]]:
    """The text of the answer and its `finished` event; every token arrived once and in order."""
    request_id = uuid.uuid4().hex
    answer = await client.subscribe(f"trine.{MODEL}.tok.{request_id}")
    await submit(client, {"id": request_id, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens})
    text = ""
    token_ids: list[int] = []
    with anyio.fail_after(ANSWER_S):
        while True:
            event = json.loads((await answer.next_msg(timeout=ANSWER_S)).data)
            if event["type"] != "tokens":
                break
            assert event["index"] == len(token_ids)
            token_ids += event["token_ids"]
            text += event.get("text", "")
    assert event["type"] == "finished", event
    assert event["usage"]["completion_tokens"] == len(token_ids)
    assert 0 < len(token_ids) <= max_tokens
    return text, event


async def test_a_fleet_answers_over_plain_nats(fleet: Fleet) -> None:
    client = await fleet.connect()
    await workers(client, prefill=1, decode=1, drafter=1)

    text, finished = await ask(client, PROMPT)

    assert text.strip()
    assert finished["served_by"]["prefill"], "a long prompt is computed by a prefill worker"
    assert finished["usage"]["prompt_tokens"] > 256
    again, repeated = await ask(client, PROMPT)
    assert again == text
    assert repeated["usage"]["cached_tokens"] > 256
    await client.close()


@pytest.mark.parametrize("role", ["prefill", "decode", "drafter"])
async def test_a_workers_health_check_passes(fleet: Fleet, role: str) -> None:
    client = await fleet.connect()
    await workers(client, **{role: 1})
    await client.close()

    await to_thread.run_sync(fleet.compose, "exec", "-T", role, "python", "/opt/trine/healthcheck.py")


async def test_a_worker_runs_without_root(fleet: Fleet) -> None:
    uid = await to_thread.run_sync(fleet.compose, "exec", "-T", "decode", "id", "-u")

    assert uid.split()[-1] == "10001"


async def test_a_second_decode_worker_shares_the_work(fleet: Fleet) -> None:
    client = await fleet.connect()
    expected, _ = await ask(client, PROMPT)

    await to_thread.run_sync(fleet.compose, "up", "-d", "--scale", "decode=2")
    live = await workers(client, decode=2)
    answers: list[tuple[str, dict[str, Any]]] = []

    async def one() -> None:
        answers.append(await ask(client, PROMPT, max_tokens=12))

    served: set[str] = set()
    with anyio.fail_after(ANSWER_S):
        while len(served) < 2:
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(one)
            served = {finished["served_by"]["decode"] for _, finished in answers}

    assert {text for text, _ in answers} == {expected}
    assert served <= live["decode"]
    await client.close()
