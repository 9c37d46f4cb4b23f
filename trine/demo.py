"""`trine demo`: a whole fleet on this machine, one answer, the prefix cache cold and warm, speculation, and HTTP."""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import signal
import sys
from collections import deque
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from shared.errors import TrineError, Unavailable
from trine import over_http
from trine.client import Client
from trine.completion import Completion
from trine.console import progress_bar
from trine.plain import plain
from trine.prepare import prepare
from trine.readiness import Counts
from trine.supervisor import Fleet

COUNTS = {"prefill": 1, "decode": 1, "drafter": 1, "gateway": 1}
# A gateway for this demo alone, whatever the environment says of another one.
GATEWAY = {"TRINE_HOST": "127.0.0.1", "TRINE_PORT": "0", "TRINE_API_KEYS": "", "TRINE_API_KEYS_FILE": ""}
READY_S = 300.0
DEADLINE_MS = 180_000
LOG_LINES = 30

QUESTION = "What is the capital of France, and what is it known for?"
COLD = "Who was the last keeper of the lighthouse?"
WARM = "What does The Copper Kettle serve?"
QUOTE = "Copy the first paragraph of the guide word for word."
OVER_HTTP = "Name one river in Europe."
MIN_WARM_TOKENS = 900
"""The guide has about 960 tokens; so many of them must come from the cache the second time."""


@dataclass(frozen=True)
class Results:
    answer: Completion
    cold: Completion
    warm: Completion
    quote: Completion
    http: over_http.Answer

    def as_dict(self) -> dict[str, object]:
        return {
            "text": self.answer.text,
            "cold": _cache_facts(self.cold),
            "warm": _cache_facts(self.warm),
            "speculation": {
                "text": self.quote.text,
                "drafted_tokens": self.quote.usage.drafted_tokens,
                "accepted_tokens": self.quote.usage.accepted_tokens,
                "completion_tokens": self.quote.usage.completion_tokens,
            },
            "http": {
                "text": self.http.text,
                "ttft_ms": round(self.http.ttft_ms, 1),
                "prompt_tokens": self.http.prompt_tokens,
                "cached_tokens": self.http.cached_tokens,
            },
            "served_by": {
                name: getattr(self, name).served_by.model_dump() for name in ("answer", "cold", "warm", "quote")
            },
        }


def _cache_facts(completion: Completion) -> dict[str, object]:
    return {
        "text": completion.text,
        "ttft_ms": round(completion.timings.ttft_ms, 1),
        "prompt_tokens": completion.usage.prompt_tokens,
        "cached_tokens": completion.usage.cached_tokens,
    }


def run(as_json: bool) -> None:
    """Raises TrineError with the workers' last lines when something does not work."""
    console = Console(stderr=True, highlight=False, quiet=as_json)
    lines: deque[str] = deque(maxlen=LOG_LINES)
    fleet = Fleet(COUNTS, role_env={"gateway": GATEWAY}, log=lambda name, line: lines.append(f"{name} | {line}"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the fleet ends in order
    try:
        with progress_bar(console) as progress:
            fleet.tokenizer = prepare(fleet.settings.model, progress)
        with fleet:
            _wait_ready(fleet, console)
            results = asyncio.run(_ask(fleet, show=not as_json))
    except TrineError as error:
        raise Unavailable("\n".join([f"the demo failed: {error.message}", *lines])) from None
    if as_json:
        print(json.dumps(results.as_dict()))
    else:
        Console(highlight=False).print(_table(results))


def _wait_ready(fleet: Fleet, console: Console) -> None:
    there = ", ".join(f"{n} {role}" for role, n in COUNTS.items())
    shown = ""
    with console.status(f"starting {there} on an embedded nats-server …") as status:

        def tell(ready: Counts) -> None:
            nonlocal shown
            text = "ready: " + (", ".join(f"{n} {role}" for role, n in sorted(ready.items())) or "nobody yet")
            if text != shown:
                shown = text
                status.update(text) if console.is_terminal else console.print(text)

        fleet.wait_ready(READY_S, tell)


async def _ask(fleet: Fleet, show: bool) -> Results:
    guide = importlib.resources.files("trine").joinpath("data/lantern_bay.txt").read_text(encoding="utf-8")
    async with Client(fleet.url, fleet.model, login=fleet.login) as client:

        async def ask(title: str, question: str, context: str = "", max_tokens: int = 64) -> Completion:
            about = [{"role": "system", "content": "Answer from the guide."}] if context else []
            text = f"{context}\n\n{question}" if context else question
            stream = client.stream(
                messages=[*about, {"role": "user", "content": text}],
                temperature=0.0,
                max_tokens=max_tokens,
                deadline_ms=DEADLINE_MS,
            )
            _write(f"\n[{title}] {question}\n> ", show)
            async with stream:
                async for delta in stream:
                    _write(delta.text, show)
            _write("\n", show)
            return stream.completion

        results = Results(
            answer=await ask("a question", QUESTION),
            cold=await ask("a town guide and a question, cold", COLD, guide),
            warm=await ask("the same guide, another question, warm", WARM, guide),
            quote=await ask("quoting it, with drafts", QUOTE, guide, max_tokens=64),
            http=await asyncio.to_thread(_ask_over_http, fleet, show),
        )
    _check(results)
    return results


def _ask_over_http(fleet: Fleet, show: bool) -> over_http.Answer:
    (url,) = fleet.gateways
    _write(f"\n[OpenAI's API, {url}/v1] {OVER_HTTP}\n> ", show)
    answer = over_http.chat(url, fleet.model, OVER_HTTP, 24, lambda text: _write(text, show))
    _write("\n", show)
    return answer


def _write(text: str, show: bool) -> None:
    if show:
        sys.stdout.write(plain(text))
        sys.stdout.flush()


def _check(results: Results) -> None:
    """The demo shows what it promises, or fails."""
    if not results.answer.text.strip():
        raise Unavailable("the answer is empty")
    if results.cold.usage.cached_tokens >= MIN_WARM_TOKENS:
        raise Unavailable("the cold prompt was in the cache already")
    if results.warm.usage.cached_tokens < MIN_WARM_TOKENS:
        raise Unavailable(f"only {results.warm.usage.cached_tokens} tokens of the warm prompt came from the cache")


def _table(results: Results) -> Table:
    table = Table(box=box.SIMPLE)
    for column in ("", "TTFT ms", "tokens", "cached", "drafts kept", "served by"):
        table.add_column(column, justify="left" if column in ("", "served by") else "right")
    for name, title in (("answer", "question"), ("cold", "cold"), ("warm", "warm"), ("quote", "quote")):
        done: Completion = getattr(results, name)
        use, by = done.usage, done.served_by
        table.add_row(
            title,
            f"{done.timings.ttft_ms:.0f}",
            str(use.prompt_tokens),
            str(use.cached_tokens),
            f"{use.accepted_tokens} of {use.drafted_tokens}",
            " ".join([*by.prefill, by.decode, *by.drafter]),
        )
    http = results.http
    table.add_row("over HTTP", f"{http.ttft_ms:.0f}", str(http.prompt_tokens), str(http.cached_tokens), "", "gateway-1")
    return table
