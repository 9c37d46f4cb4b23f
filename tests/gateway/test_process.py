"""`python -m services.gateway` as it is started for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import httpx2

from tests.nats_fleet import ROOT


def start(**env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "services.gateway"]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("TRINE_")}
    settings = {"TRINE_PORT": "0", "TRINE_LOG_FORMAT": "json", "TRINE_NATS_URL": "nats://127.0.0.1:9", **env}
    return subprocess.Popen(command, cwd=ROOT, env=mine | settings, stderr=subprocess.PIPE, text=True)


def test_alone_it_lives_refuses_fast_and_ends_well() -> None:
    """Cases 80, 123, 124."""
    process = start()
    assert process.stderr is not None
    try:
        lines: list[str] = []
        while '"listening"' not in (line := process.stderr.readline()):
            assert line, lines
            lines.append(line)
        assert any("no API keys are set" in line for line in lines)
        address = line.split('"address": "')[1].split('"')[0]
        with httpx2.Client(base_url=address, timeout=5) as http:
            assert http.get("/health").status_code == 200
            ready = http.get("/ready")
            assert (ready.status_code, ready.json()["reason"]) == (503, "NATS is not reachable")
            began = time.monotonic()
            refused = http.post("/v1/completions", json={"model": "m", "prompt": "x"})
            assert refused.status_code == 503 and time.monotonic() - began < 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        assert '"stopped"' in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_settings_that_cannot_work() -> None:
    process = start(TRINE_API_KEYS="acme:short-secret")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "16 to 512 characters" in errors and "short-secret" not in errors
