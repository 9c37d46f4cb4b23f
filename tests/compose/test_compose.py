"""compose.yaml for real: build the images, start a secured fleet, talk to it as clients do, scale and break it.

`COMPOSE` names the compose command (default: `docker compose`, and a skip where no engine answers). The project gets a
name and ports of its own, so that a fleet that already runs here is left alone. Only what a client of any language has
is used: OpenAI's client, subjects and JSON with nats-py, and the gateway's metrics.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import nats
import openai
import pytest
import yaml
from anyio import to_thread
from nats.aio.client import Client
from nats.errors import Error as NatsError

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m-instruct"
PROMPT = (
    "The lighthouse keeper wrote in his log every evening. He noted the wind, the height of the waves, the ships "
    "that passed and the birds that rested on the rail. In winter the nights were long, and he wrote more. "
) * 8 + "\n\nIn one sentence, the log of the next evening says:"
QUESTION = "Name three animals that live on a farm, and say what each of them is kept for."
ROLES = ("prefill", "decode", "drafter")
UID = 10001
BUILD_S = 900.0
START_S = 600.0
ANSWER_S = 240.0
LOAD = 4  # answers at a time
# What a service finds where it runs.
INSIDE = """
import importlib.util, json, os, pathlib, shutil
own = pathlib.Path("/run/trine")
found = {"uid": os.getuid(), "files": os.listdir(own), "user": (own / "credentials").read_text().splitlines()[0]}
found["tools"] = [tool for tool in ("gcc", "cc", "make") if shutil.which(tool)]
found["writable"] = [path for path in ("/", "/opt/trine", "/app", "/venv", "/run/trine") if os.access(path, os.W_OK)]
found["torch"] = importlib.util.find_spec("torch") is not None
print(json.dumps(found))
"""

pytestmark = [pytest.mark.compose, pytest.mark.anyio, pytest.mark.timeout(BUILD_S + START_S)]


@dataclass(frozen=True)
class Fleet:
    command: list[str]
    nats_port: int
    http_port: int
    env: dict[str, str] = field(default_factory=dict)
    """What the documented command gives a client."""

    def compose(self, *arguments: str, timeout: float = 120.0, ok: bool = True) -> str:
        """Run one compose command; its standard output. Fails the test, showing all output, when the command fails."""
        env = {**os.environ, "COMPOSE_PROJECT_NAME": f"trinetest{os.getpid()}"}
        env |= {"NATS_PORT": str(self.nats_port), "GATEWAY_PORT": str(self.http_port)}
        done = subprocess.run(
            [*self.command, *arguments],
            check=False,
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode and ok:
            pytest.fail(f"compose {' '.join(arguments)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-8000:]}")
        return done.stdout

    def credentials(self, folder: Path) -> dict[str, str]:
        """As docs/deployment.md says: a shell evaluates what the command prints."""
        printed = self.compose("run", "--rm", "-T", "credentials", "show")
        done = subprocess.run(
            ["sh", "-c", 'eval "$PRINTED" && env -0'],
            check=True,
            cwd=folder,
            env={"PRINTED": printed, "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=20,
        )
        pairs = (line.partition("=") for line in done.stdout.split("\0") if "=" in line)
        return {name: value for name, _, value in pairs if name != "PRINTED"}

    @property
    def http(self) -> str:
        return self.env["OPENAI_BASE_URL"].removesuffix("/v1")

    def openai(self, key: str = "") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.env["OPENAI_BASE_URL"],
            api_key=key or self.env["OPENAI_API_KEY"],
            max_retries=0,
            timeout=ANSWER_S,
        )

    async def connect(self, **login: Any) -> Client:
        tls = ssl.create_default_context(cafile=self.env["NATS_CA"])
        return await nats.connect(
            self.env["NATS_URL"], tls=tls, inbox_prefix=b"_INBOX.default", allow_reconnect=False, **login
        )

    async def client(self) -> Client:
        return await self.connect(user=self.env["NATS_USER"], password=self.env["NATS_PASSWORD"])

    def secrets(self) -> list[str]:
        """Every password and key that there is."""
        script = "print(open('/credentials/all/vault.json').read())"
        vault = self.compose("run", "--rm", "-T", "--entrypoint", "python", "credentials", "-c", script)
        return re.findall(r'"((?:p|sk-)[0-9a-f]{48})"', vault)


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
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(compose_command(), free_port(), free_port())
    failed = request.session.testsfailed
    try:
        fleet.compose("up", "--build", "-d", timeout=BUILD_S)
        fleet.env.update(fleet.credentials(tmp_path_factory.mktemp("client")))
        yield fleet
        if request.session.testsfailed > failed:
            sys.stderr.write(fleet.compose("logs", ok=False)[-20000:])
    finally:
        fleet.compose("down", "--remove-orphans", timeout=180.0)  # replicas first: they may hold the broker
        fleet.compose("down", "-v", timeout=180.0)


async def live(fleet: Fleet, metric: str = "trine_worker_up") -> dict[str, dict[str, float]]:
    """A metric of the gateway by role and worker; nothing while it does not answer."""
    found: dict[str, dict[str, float]] = {role: {} for role in ROLES}
    try:
        async with httpx2.AsyncClient(timeout=5) as http:
            text = (await http.get(f"{fleet.http}/metrics")).text
    except httpx2.HTTPError:
        return found
    for labels, value in re.findall(rf"^{metric}\{{(.*?)\}} (\S+)$", text, re.M):
        told = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found.setdefault(told["role"], {})[told["worker"]] = float(value)
    return found


async def workers(fleet: Fleet, **wanted: int) -> dict[str, set[str]]:
    """Names of the workers that take work, once there are as many of each role as wanted."""
    with anyio.fail_after(START_S):
        while True:
            ready = {role: {w for w, up in its.items() if up} for role, its in (await live(fleet)).items()}
            if all(len(ready[role]) >= count for role, count in wanted.items()):
                return ready
            await anyio.sleep(0.5)


async def ask(client: Client, prompt: str, max_tokens: int = 12) -> tuple[str, dict[str, Any]]:
    """The text of the answer and its `finished` event, over plain NATS; every token arrived once and in order."""
    request_id = uuid.uuid4().hex
    answer = await client.subscribe(f"trine.{MODEL}.tok.{request_id}")
    request = {"id": request_id, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens}
    await client.jetstream().publish(f"trine.{MODEL}.req.normal", json.dumps(request).encode())
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


async def chat(client: openai.AsyncOpenAI, question: str = QUESTION, max_tokens: int = 40) -> str:
    """A streamed answer, complete."""
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
    )
    chunks = [choice async for chunk in stream for choice in chunk.choices]
    assert chunks[-1].finish_reason in ("stop", "length")
    return "".join(choice.delta.content or "" for choice in chunks)


def test_gpus_are_reserved_where_the_second_file_is_named() -> None:
    """GPUs are not needed to ask compose what it makes of the files."""
    files = ("-f", "compose.yaml", "-f", "compose.gpu.yaml")
    printed = Fleet(compose_command(), 4222, 8000).compose(*files, "config")
    services = yaml.safe_load(printed[printed.index("name:") :])["services"]
    for role in ROLES:
        (device,) = services[role]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"] and services[role]["image"].startswith("trine-cuda:")


async def test_openais_client_is_answered(fleet: Fleet) -> None:
    await workers(fleet, prefill=1, decode=1, drafter=1)

    async with fleet.openai() as client:
        assert (await chat(client)).strip()
    async with fleet.openai("sk-of-somebody-who-has-none") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await chat(stranger)


async def test_a_client_of_plain_nats_is_answered(fleet: Fleet) -> None:
    client = await fleet.client()

    text, finished = await ask(client, PROMPT)

    assert text.strip()
    assert finished["served_by"]["prefill"], "a long prompt is computed by a prefill worker"
    assert finished["usage"]["prompt_tokens"] > 256
    again, repeated = await ask(client, PROMPT)
    assert again == text
    assert repeated["usage"]["cached_tokens"] > 256
    await client.close()


async def test_nobody_comes_in_without_a_password(fleet: Fleet) -> None:
    for login in ({}, {"user": "decode", "password": "decode"}):
        with pytest.raises((NatsError, OSError), match=r"(?i)authorization"):
            await fleet.connect(**login)


@pytest.mark.parametrize("role", [*ROLES, "gateway"])
async def test_a_service_is_healthy_without_root_and_has_its_own_login_alone(fleet: Fleet, role: str) -> None:
    health = "entrypoint.sh python /opt/trine/healthcheck.py" if role != "gateway" else "gateway_health.py"
    runner = "python " if role == "gateway" else ""
    script = f"{runner}/opt/trine/{health} >&2 && exec python -c '{INSIDE}'"

    printed = await to_thread.run_sync(fleet.compose, "exec", "-T", role, "sh", "-c", script)

    found = json.loads(printed.splitlines()[-1])
    assert found["uid"] == UID and not found["tools"] and not found["writable"]
    assert found["torch"] == (role != "gateway")
    assert set(found["files"]) == {"ca.pem", "credentials"} | ({"api-keys"} if role == "gateway" else set())
    assert found["user"] == f"TRINE_NATS_USER={role}"


async def test_scaling_and_a_killed_container_under_load_cost_no_answer(fleet: Fleet) -> None:
    """`--scale prefill=2 --scale decode=3`, then SIGKILL to a decode worker that is at work."""
    before = await workers(fleet, decode=1, prefill=1)
    async with fleet.openai() as client:
        expected = await chat(client)
    over = anyio.Event()
    answers: list[str] = []

    async def load() -> None:
        async with fleet.openai() as client:
            while not over.is_set():
                answers.append(await chat(client))

    async with anyio.create_task_group() as tasks:
        for _ in range(LOAD):
            tasks.start_soon(load)
        # In two steps: podman-compose heeds only the last `--scale`, and leaves alone what is there already.
        for scale in (("--scale", "prefill=2"), ("--scale", "prefill=2", "--scale", "decode=3")):
            await to_thread.run_sync(partial(fleet.compose, "up", "-d", "--no-build", *scale, timeout=START_S))
        after = await workers(fleet, decode=3, prefill=2)
        assert before["decode"] <= after["decode"] and before["prefill"] <= after["prefill"], "nobody was replaced"
        scaled = len(answers)
        killed = await kill_one_at_work(fleet)
        with anyio.fail_after(ANSWER_S):
            while killed in (await workers(fleet, decode=2))["decode"]:
                await anyio.sleep(0.2)
            while len(answers) < scaled + 4 * LOAD:
                await anyio.sleep(0.2)
        over.set()

    assert set(answers) == {expected}


async def kill_one_at_work(fleet: Fleet) -> str:
    """All processes in the first decode container but the first, which then ends too. The worker's name."""
    name = f"decode-{(await to_thread.run_sync(fleet.compose, 'exec', '-T', 'decode', 'hostname')).split()[-1]}"
    with anyio.fail_after(ANSWER_S):
        while not (await live(fleet, "trine_worker_running"))["decode"].get(name):
            await anyio.sleep(0.1)
    command = ("exec", "-T", "decode", "sh", "-c", "kill -9 -1")
    await to_thread.run_sync(partial(fleet.compose, *command, ok=False))
    return name


async def test_an_operator_looks_into_the_cache(fleet: Fleet) -> None:
    order = ("--profile", "tools", "run", "--rm", "-T", "operator", "trine", "cache", "ls", "--json")
    printed = await to_thread.run_sync(fleet.compose, *order)

    assert json.loads(printed)


async def test_a_second_start_keeps_the_credentials_and_nothing_secret_is_logged(fleet: Fleet, tmp_path: Path) -> None:
    def again() -> tuple[dict[str, str], list[str], str]:
        fleet.compose("run", "--rm", "-T", "credentials", "make")
        return fleet.credentials(tmp_path), fleet.secrets(), fleet.compose("logs", timeout=60)

    now, secrets, logs = await to_thread.run_sync(again)

    assert {n: v for n, v in now.items() if "PASSWORD" in n or "KEY" in n} == {
        n: v for n, v in fleet.env.items() if "PASSWORD" in n or "KEY" in n
    }
    assert len(secrets) == 7 and {fleet.env["NATS_PASSWORD"], fleet.env["OPENAI_API_KEY"]} <= set(secrets)
    assert "ready" in logs and not [secret for secret in secrets if secret in logs]
