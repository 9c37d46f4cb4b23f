"""The demo's own client of OpenAI's API, against what a gateway sends and what a broken one might."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from shared.errors import Unavailable
from trine import over_http

USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


def lines(*events: dict[str, Any]) -> bytes:
    return b"".join(b"id: x\ndata: " + json.dumps(event).encode() + b"\n\n" for event in events)


@contextmanager
def gateway(answer: bytes, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert self.path == "/v1/chat/completions" and body["stream"] and body["model"] == "m"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(url: str) -> tuple[over_http.Answer, list[str]]:
    shown: list[str] = []
    return over_http.chat(url, "m", "Hi", 8, shown.append), shown


def test_parts_are_shown_as_they_come_and_usage_is_told() -> None:
    whole = lines({"choices": [{"delta": {"role": "assistant"}}]}, said("the "), said("Rhine"))
    with gateway(b": keepalive\n\n" + whole + lines({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n") as url:
        answer, shown = ask(url)
    assert (answer.text, shown) == ("the Rhine", ["the ", "Rhine"])
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 4) and answer.ttft_ms > 0


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (b'{"error": {"message": "no decode worker"}}', 503, "the gateway refused: 503 .*no decode worker"),
        (lines(said("the "), {"error": {"message": "it broke"}}), 200, "ended the answer: it broke"),
        (lines(said("the ")), 200, "is not complete"),
        (lines({"choices": [], "usage": USAGE}), 200, "is not complete"),
        (b"data: {not json}\n\n", 200, "did not answer"),
    ],
)
def test_what_is_no_answer_is_told(answer: bytes, status: int, message: str) -> None:
    with gateway(answer, status) as url, pytest.raises(Unavailable, match=message):
        ask(url)


def test_nobody_there() -> None:
    with pytest.raises(Unavailable, match="did not answer"):
        ask("http://127.0.0.1:9")
