"""What the gateway adds to plain NATS, with a decode worker whose model costs nothing.

`python -m benchmarks.gateway [--json]`. About a minute. The gateway is one process on a core of its own; NATS, the
worker and the load share another one. Times to the first token are of single requests, through the gateway and over
plain NATS in turn; their medians are compared, in several rounds. Then so many streams are read at once that the
gateway is busy all the time, through it and over plain NATS in turn: tokens a second, and the CPU time that each cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from typing import Any

from benchmarks import machine
from benchmarks.bars import judged, tabled
from shared.bus.embedded import EmbeddedNats
from trine.bench_http import HttpTarget
from trine.bench_load import Load, Target, drive
from trine.bench_nats import NatsTarget
from trine.bench_sets import Prompt
from trine.bench_stats import Record
from trine.client import Client
from trine.process import environment, python

MODEL = "fake"
STEP_S = 0.01
READY_S = 30.0
PROMPTS = repeat(Prompt("How do I make a simple tomato soup?"))
BARS = {"ttft_added_ms": ("<=", 5.0), "tokens_per_s": (">=", 2000.0)}


@contextmanager
def child(command: Sequence[str], core: int, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of our own modules on one core, ended at the end."""
    process = subprocess.Popen(python("-m", *command), env=environment(env), stdout=subprocess.DEVNULL)
    os.sched_setaffinity(process.pid, {core})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Raises TimeoutError, or SystemExit when the process has ended."""

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    async with asyncio.timeout(READY_S):
        while not await asyncio.to_thread(answers):
            if process.poll() is not None:
                raise SystemExit(f"the gateway ended at start with {process.returncode}")
            await asyncio.sleep(0.1)


def whole(records: Sequence[Record], tokens: int) -> Sequence[Record]:
    """A benchmark with errors is worth nothing."""
    for record in records:
        if record.error or record.tokens != tokens:
            raise SystemExit(f"an answer failed: {record.error or f'{record.tokens} of {tokens} tokens'}")
    return records


async def first_token_ms(target: Target, requests: int) -> float:
    records = whole(await drive(target, PROMPTS, Load(requests, 2, concurrency=1)), 2)
    return statistics.median(record.pieces[0] - record.due for record in records) * 1e3


async def tokens_per_s(target: Target, streams: int, tokens: int) -> float:
    records = whole(await drive(target, PROMPTS, Load(streams * 2, tokens, concurrency=streams)), tokens)
    began, ended = min(record.due for record in records), max(record.ended for record in records)
    return sum(record.tokens for record in records) / (ended - began)


async def measure(url: str, nats: str, pid: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Rounds of every number."""
    found: dict[str, list[float]] = defaultdict(list)
    async with Client(nats, MODEL) as client, HttpTarget(url, MODEL) as through:
        plain = NatsTarget(client)
        for target in (through, plain):
            await first_token_ms(target, 10)
        for _ in range(options.rounds):
            used = machine.cpu_seconds(pid)
            found["gateway_ttft_ms"].append(await first_token_ms(through, options.requests))
            found["cpu_ms_per_request"].append((machine.cpu_seconds(pid) - used) / options.requests * 1e3)
            found["nats_ttft_ms"].append(await first_token_ms(plain, options.requests))
        for _ in range(options.rounds):
            used = machine.cpu_seconds(pid)
            found["gateway_tokens_per_s"].append(await tokens_per_s(through, options.streams, options.tokens))
            tokens = options.streams * 2 * options.tokens
            found["cpu_us_per_token"].append((machine.cpu_seconds(pid) - used) / tokens * 1e6)
            found["nats_tokens_per_s"].append(await tokens_per_s(plain, options.streams, options.tokens))
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    described = machine.described()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the gateway, one for everything else")
    os.sched_setaffinity(0, {cores[0]})
    port = machine.free_port()
    with ExitStack() as stack:
        nats = stack.enter_context(EmbeddedNats())
        stack.enter_context(child(["benchmarks.gateway_worker", nats.url, MODEL, str(STEP_S)], cores[0]))
        env = {"TRINE_NATS_URL": nats.url, "TRINE_PORT": str(port), "TRINE_LOG_LEVEL": "error"}
        gateway = stack.enter_context(child(["services.gateway"], cores[1], **env))
        url = f"http://127.0.0.1:{port}"
        asyncio.run(ready(url, gateway))
        found = asyncio.run(measure(url, nats.url, gateway.pid, options))
    added = [a - b for a, b in zip(found["gateway_ttft_ms"], found["nats_ttft_ms"], strict=True)]
    result: dict[str, Any] = {
        "machine": described,
        "streams": options.streams,
        "ttft_added_ms": statistics.median(added),
        "tokens_per_s": statistics.median(found["gateway_tokens_per_s"]),
        "rows": {"ttft_added_ms": spread(added), **{name: spread(values) for name, values in found.items()}},
    }
    return {**result, "bars": judged(result, BARS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="of everything (default 5)")
    parser.add_argument("--requests", type=int, default=40, help="single requests in a round (default 40)")
    parser.add_argument("--streams", type=int, default=64, help="at once (default 64)")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream (default 128)")
    options = parser.parse_args()
    result = run(options)
    print(json.dumps(result) if options.json else "\n".join([machine.line(result["machine"]), "", *tabled(result)]))
    sys.exit(0 if all(bar["passed"] for bar in result["bars"].values()) else 1)


if __name__ == "__main__":
    main()
