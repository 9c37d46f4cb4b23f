"""What containers are asked for their health."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import anyio
import pytest

from deploy import gateway_health, healthcheck
from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.codec import encode
from shared.messages import Beat
from shared.subjects import Subjects


@pytest.fixture(scope="module")
def nats() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


def ask(monkeypatch: pytest.MonkeyPatch, url: str, *arguments: str) -> int:
    monkeypatch.setattr(healthcheck, "WAIT_S", 1.0)
    monkeypatch.setattr(sys, "argv", ["healthcheck.py", *arguments])
    monkeypatch.setenv("TRINE_NATS_URL", url)
    monkeypatch.setenv("TRINE_MODEL_NAME", "fake")
    monkeypatch.setenv("TRINE_WORKER", "decode-7")
    return healthcheck.main()


def beating(url: str, worker: str, over: threading.Event) -> threading.Thread:
    async def beat() -> None:
        bus = await NatsBus.connect(url, name=worker, wait=5)
        while not over.is_set():
            await bus.publish(Subjects("fake").beat("decode", worker), encode(Beat(role="decode", worker=worker)))
            await anyio.sleep(0.1)
        await bus.close()

    thread = threading.Thread(target=lambda: anyio.run(beat))
    thread.start()
    return thread


@pytest.mark.parametrize(("worker", "code"), [("decode-7", 0), ("decode-8", 1)])
def test_a_worker_is_healthy_by_its_own_beat(
    nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, worker: str, code: int
) -> None:
    over = threading.Event()
    thread = beating(nats.url, worker, over)
    try:
        assert ask(monkeypatch, nats.url) == ask(monkeypatch, nats.url, "--excuse-nats") == code
    finally:
        over.set()
        thread.join(10)


def test_a_worker_is_not_blamed_for_nats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(monkeypatch, "nats://127.0.0.1:9", "--excuse-nats") == 0
    assert ask(monkeypatch, "nats://127.0.0.1:9") == 1
    assert "no beat from this worker" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_a_gateway_is_healthy_while_it_would_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, code: int
) -> None:
    asked = []

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b'{"reason": "no decode worker is heard"}')

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("TRINE_PORT", str(server.server_port))
        assert gateway_health.main() == code
        server.shutdown()
    assert asked == ["/ready"]
    assert ("no decode worker is heard" in capsys.readouterr().err) == bool(code)
    assert gateway_health.main() == 1  # nobody listens
