"""Traceparents that anybody may send, processes without tracing, and where spans go."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from shared import tracing
from shared.config import Settings
from shared.errors import ConfigError
from shared.tracing import ENDPOINTS, HEADER, OFF, UNTRACED, Kind, parent_of

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*ENDPOINTS, "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    yield
    tracing.install(None)


@pytest.mark.parametrize(
    "value",
    [
        "",
        GOOD.upper(),
        GOOD + "\n",
        f" {GOOD}",
        f"{GOOD}-more",
        GOOD[:-1],
        GOOD.replace("00-", "01-", 1),
        GOOD.replace("00-", "ff-", 1),
        GOOD[:-2] + "04",
        GOOD[:-2] + "ff",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        GOOD.replace("0a", "0\u0663", 1),
        GOOD.replace("0a", "0g", 1),
        "x" * 100_000,
    ],
)
def test_only_whole_traceparents_are_taken(value: str) -> None:
    assert parent_of({HEADER: value}) == ""
    assert OFF.begin("serve", Kind.CONSUMER, {HEADER: value}) is UNTRACED


def test_a_process_without_tracing_hands_on_what_it_was_given() -> None:
    span = OFF.begin("serve", Kind.CONSUMER, {HEADER: GOOD, "tracestate": "a=b"})
    below = span.child("load").child("await prefill", ago=1.0)
    below.set({"a": 1})
    below.end("failed")
    assert below.headers == {HEADER: GOOD}
    assert not below.recording


def test_off_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    tracing.configure(Settings(), "decode", "decode-1")
    assert tracing.tracer() is OFF
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        monkeypatch.setenv(name, value)
        tracing.configure(Settings(otlp_endpoint="http://127.0.0.1:1"), "decode", "decode-1")
        assert tracing.tracer() is OFF
        monkeypatch.delenv(name)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shared.otel", None)
    with pytest.raises(ConfigError, match=r"TRINE_OTLP_ENDPOINT.*trine\[otel\]"):
        tracing.configure(Settings(otlp_endpoint="http://127.0.0.1:1"), "decode", "decode-1")
    monkeypatch.setenv(ENDPOINTS[1], "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT"):
        tracing.configure(Settings(), "decode", "decode-1")


@contextmanager
def collector(hangs: bool = False) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """An OTLP endpoint, and (path, body) of what it was sent."""
    got: list[tuple[str, bytes]] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            if hangs:
                over.wait(20)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        over.set()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("standard", [False, True])
def test_spans_are_sent(monkeypatch: pytest.MonkeyPatch, standard: bool) -> None:
    with collector() as (url, got):
        if standard:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        tracing.configure(Settings(otlp_endpoint="" if standard else url), "decode", "decode-7")
        span = tracing.tracer().begin("serve", Kind.CONSUMER, {HEADER: GOOD})
        span.child("load").end()
        span.end()
        tracing.tracer().close(5.0)
    ((path, body),) = got
    assert path == "/v1/traces"
    for told in (b"trine-decode", b"decode-7", b"serve", b"load", bytes.fromhex(GOOD.split("-")[1])):
        assert told in body


def test_a_collector_that_hangs_holds_nobody_up() -> None:
    with collector(hangs=True) as (url, got):
        tracing.configure(Settings(otlp_endpoint=url), "decode", "decode-1")
        tracing.tracer().begin("serve", Kind.CONSUMER, {}).end()
        started = time.monotonic()
        tracing.tracer().close(0.3)
        assert time.monotonic() - started < 2
        assert got


def test_off_costs_nothing_to_speak_of() -> None:
    """Of a request: a dozen of these. A step takes milliseconds."""
    started = time.perf_counter()
    for _ in range(1000):
        span = OFF.begin("serve", Kind.CONSUMER, {})
        span.child("load").end()
    assert time.perf_counter() - started < 0.1, "100 µs each, many times what it takes"
