"""Every code block of the README is run; those that need tools which a machine may lack are checked as far as it goes.

A comment before each block says how it is tested: `make`, `up`, `run`, `python`, or `needs: TOOL`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import nats
import pytest
import yaml

from shared.codec import decode, decode_event
from shared.config import DEFAULT_MODEL, DEFAULT_NATS_URL
from shared.messages import Finished, Generate
from shared.subjects import Subjects
from trine.supervisor import Fleet

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"(?:<!-- (?P<how>[^>]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```", re.S | re.M)
BLOCKS = [(m["how"], m["language"], m["code"]) for m in BLOCK.finditer(README)]


def blocks(how: str) -> list[str]:
    found = [code for tag, _, code in BLOCKS if tag == how]
    assert found, f"the README has no block to {how}"
    return found


def commands(code: str) -> list[list[str]]:
    """Each line as a shell would split it, comments left out."""
    return [words for line in code.splitlines() if (words := shlex.split(line, comments=True))]


def environment(**extra: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRINE_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), clean["PATH"]])
    return {**clean, "PATH": path, "PYTHONPATH": str(ROOT), **extra}


def test_every_block_says_how_it_is_tested() -> None:
    handled = {"make", "up", "run", "python", "needs: nats", "needs: docker"}
    assert {how for how, language, _ in BLOCKS if language != "mermaid"} == handled


def test_make_targets_exist() -> None:
    for code in blocks("make"):
        for words in commands(code):
            done = subprocess.run(
                [*words, "--dry-run"], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_up_starts_a_fleet_and_ctrl_c_ends_it() -> None:
    """The block as it stands, but on free ports: somebody may have servers on 4222 and 8000."""
    (code,) = blocks("up")
    (words,) = commands(code)
    with subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment(TRINE_NATS_URL="embedded:0", TRINE_PORT="0", TRINE_KV_MEMORY_MB="128"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert re.fullmatch(
            rf"ready: {DEFAULT_MODEL} at nats://127\.0\.0\.1:\d+ \(1 prefill, 2 decode, 1 drafter\), "
            r"http://127\.0\.0\.1:\d+/v1; .*\n",
            ready,
        )
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert time.monotonic() - started < 6


@pytest.mark.parametrize("code", blocks("run"))
def test_shell_blocks(stack: Fleet, code: str) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        check=False,
        cwd=ROOT,
        env=environment(TRINE_NATS_URL=stack.url),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout.splitlines()[0]
    assert "Paris" in json.loads(done.stdout.splitlines()[-1])["text"]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks(stack: Fleet, code: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(code.replace(DEFAULT_NATS_URL, stack.url).replace("http://127.0.0.1:8000", stack.gateways[0]))
    done = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        env=environment(TRINE_NATS_URL=stack.url),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout


@pytest.mark.anyio
async def test_nats_command_block_is_parsed_and_its_message_sent_without_the_nats_command(stack: Fleet) -> None:
    (code,) = blocks("needs: nats")
    (_, sub, subject), (_, pub, to, payload) = commands(code)
    request = decode(payload.encode(), Generate)
    subjects = Subjects(DEFAULT_MODEL)
    assert (sub, subject) == ("sub", subjects.events(request.id))
    assert (pub, to) == ("pub", subjects.request("normal"))

    connection = await nats.connect(stack.url)
    events = await connection.subscribe(subject)
    await connection.publish(to, payload.encode())
    while True:
        event = decode_event((await events.next_msg(timeout=60)).data)
        if event.type != "tokens":
            break
    assert isinstance(event, Finished)
    await connection.close()


def test_compose_block_is_parsed_only_since_tests_compose_runs_it() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    (code,) = blocks("needs: docker")
    for words in commands(code):
        assert words[:3] == ["docker", "compose", "up"]
        scaled = [word.split("=")[0] for word in words if "=" in word]
        assert set(scaled) <= set(services)
        assert set(words[3:]) - {"--build", "-d", "--scale"} == {word for word in words if "=" in word}


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:trine|services|shared|tests|docs|examples)/[\w./]*)`", README):
        assert (ROOT / path).exists(), path
