"""What a newcomer runs: the demo, twice, and the example that uses nothing but a NATS client."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trine.supervisor import Fleet

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plain_nats.py"


def run(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRINE_")}
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_the_plain_example_needs_only_a_nats_client_and_json() -> None:
    names: set[str] = set()
    for node in ast.walk(ast.parse(EXAMPLE.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        assert not isinstance(node, ast.ImportFrom)
    assert names == {"argparse", "asyncio", "json", "uuid", "nats"}


def test_the_plain_example_prints_an_answer(stack: Fleet) -> None:
    done = run(str(EXAMPLE), "What is the capital of France?", "--nats", stack.url, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout
    assert done.stdout.rstrip().endswith(("by decode-1)", "by decode-2)"))


def demo() -> dict[str, Any]:
    done = run("-m", "trine.cli", "demo", "--json", timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_shows_what_it_promises_and_does_so_again() -> None:
    first, second = demo(), demo()
    for result in (first, second):
        assert "Paris" in result["text"]
        assert "Marta Hollis" in result["cold"]["text"]
        assert "fish soup" in result["warm"]["text"]
        assert result["cold"]["cached_tokens"] == 0
        assert result["warm"]["cached_tokens"] > 900
        assert result["warm"]["ttft_ms"] < result["cold"]["ttft_ms"] / 2
        assert result["speculation"]["drafted_tokens"] >= result["speculation"]["accepted_tokens"] > 0
        assert result["served_by"]["quote"]["decode"] == "decode-1"
        assert [name.split(":")[0] for name in result["served_by"]["quote"]["drafter"]] == ["drafter-1"]
    assert [first[part]["text"] for part in ("cold", "warm")] == [second[part]["text"] for part in ("cold", "warm")]
