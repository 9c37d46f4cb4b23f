"""A target on NATS: a running fleet, asked as `trine generate` asks it."""

from __future__ import annotations

import time

from shared.errors import TrineError
from trine.bench_sets import Prompt
from trine.bench_stats import Record
from trine.client import Client


class NatsTarget:
    """`client` is open."""

    def __init__(self, client: Client, timeout: float = 600.0) -> None:
        self._client = client
        self._deadline_ms = max(1, round(timeout * 1e3))

    async def ask(self, prompt: Prompt, max_tokens: int, record: Record) -> None:
        try:
            stream = self._client.stream(messages=prompt.messages, max_tokens=max_tokens, deadline_ms=self._deadline_ms)
            async with stream:
                async for delta in stream:
                    if delta.text:
                        record.pieces.append(time.monotonic())
            usage = stream.completion.usage
            record.tokens, record.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
            record.cached_tokens = usage.cached_tokens
            record.error = "" if record.pieces else "empty"
        except TrineError as error:
            record.error = error.code
        record.ended = time.monotonic()
