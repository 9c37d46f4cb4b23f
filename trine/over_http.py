"""One question to a gateway over HTTP, as any client of OpenAI's API would ask it. Standard library only."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shared.errors import Unavailable

TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int


def chat(url: str, model: str, question: str, max_tokens: int, show: Callable[[str], None]) -> Answer:
    """Stream the answer of the gateway at `url`; `show` gets its parts. Blocking. Raises Unavailable."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return _collected(_events(response), started, show)
    except urllib.error.HTTPError as error:
        raise Unavailable(f"the gateway refused: {error.code} {error.read(2048).decode(errors='replace')}") from None
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        raise Unavailable(f"the gateway did not answer: {error!r}") from None


def _collected(events: Iterator[dict[str, Any]], started: float, show: Callable[[str], None]) -> Answer:
    text, first, usage = "", 0.0, None
    for event in events:
        if "error" in event:
            raise Unavailable(f"the gateway ended the answer: {event['error'].get('message')}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if said := choice["delta"].get("content"):
                first = first or time.monotonic()
                text += said
                show(said)
    if usage is None or not text:
        raise Unavailable("the gateway's answer is not complete")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(text, 1e3 * (first - started), usage["prompt_tokens"], cached)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Data of server-sent events until the last one."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[len(b"data: ") :])
