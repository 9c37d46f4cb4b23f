"""Measures what steps cost on this machine: `python -m benchmarks.simulate --calibrate`.

The engine alone, one thread, in CPU seconds, so that neighbours count for little; then beside a copy of itself; then a
fleet of one decode worker with one request at a time, for what a worker does beside the engine's steps.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_seconds, described
from benchmarks.simulate_costs import Costs, fitted, parts
from shared.config import DEFAULT_MODEL
from shared.engine.span import Span
from shared.messages import Sampling
from trine.client import Client
from trine.process import environment, python

BLOCK, SEQUENCES, LONGEST = 16, 16, 1280
GREEDY = Sampling(temperature=0.0)
TURNS = 7
PROMPT, LONG, ANSWERS = 64, 64, 6
READY_S = 240.0
TRIPS_S = 0.004
"""What an intake waits for NATS, as it was measured there: a pull, a note and its ack, an append, and events."""
DRAFT_BASE_S, DRAFT_TOKEN_S, ACCEPTANCE = 0.004, 0.0015, 0.4
"""Of the draft head that ships, on one core: docs/speculation.md has asks of 6 ms and drafts of 0.03 steps."""


def shapes() -> list[tuple[str, tuple[tuple[int, int, int], ...]]]:
    """(name, spans as (tokens, start, rows)): decode steps, drafts, chunks of prompts, and both together."""
    found: list[tuple[str, tuple[tuple[int, int, int], ...]]] = []
    for context in (64, 512):
        for n in (1, 2, 4, 8, 16):
            found.append((f"{n} sequences at {context}", ((1, context, 1),) * n))
        for n, k in ((1, 2), (1, 4), (1, 6), (1, 8), (1, 12), (4, 2), (4, 4)):
            found.append((f"{n} sequences at {context}, {k} drafts", ((1 + k, context, 1 + k),) * n))
    for start in (0, 512, 1008):
        for tokens in (16, 64, 128, 256):
            found.append((f"{tokens} of a prompt at {start}", ((tokens, start, 0),)))
    for tokens, start, n in ((128, 0, 4), (240, 512, 8), (64, 0, 1)):
        found.append((f"{tokens} of a prompt at {start} beside {n}", ((tokens, start, 1), *((1, 256, 1),) * n)))
    return found


class Bench:
    def __init__(self, folder: Path) -> None:
        from shared.engine.engine import Engine

        blocks = SEQUENCES * (LONGEST // BLOCK)
        self.engine = Engine.load(folder, block_size=BLOCK, kv_blocks=blocks, threads=1)
        for sequence in range(SEQUENCES):
            self.engine.step([self._span(sequence, (256, 0, 0))])

    def _span(self, sequence: int, shape: tuple[int, int, int]) -> Span:
        tokens, start, rows = shape
        each = LONGEST // BLOCK
        table = tuple(range(sequence * each, (sequence + 1) * each))
        ids = tuple(1000 + (sequence * 97 + i * 31) % 20000 for i in range(tokens))
        return Span(ids, start, table, rows, 0, GREEDY, slot=sequence)

    def spans(self, shape: Sequence[tuple[int, int, int]]) -> list[Span]:
        return [self._span(sequence, one) for sequence, one in enumerate(shape)]

    def seconds(self, spans: Sequence[Span], turns: int, clock: Callable[[], float] = time.process_time) -> list[float]:
        out = []
        for turn in range(turns + 1):
            started = clock()
            self.engine.step(spans)
            if turn:
                out.append(clock() - started)
        return out


def measured(say: Callable[[str], None]) -> Costs:
    from shared.engine.weights import resolve

    folder = resolve(DEFAULT_MODEL)
    bench = Bench(folder)
    samples: list[tuple[list[float], float]] = []
    for name, shape in shapes():
        spans = bench.spans(shape)
        seconds = statistics.median(bench.seconds(spans, TURNS))
        samples.append((parts(spans), seconds))
        say(f"{name}: {seconds * 1e3:.1f} ms")
    weights, fit = fitted(samples)
    contention = _contention(bench)
    block_bytes = bench.engine.info.block_bytes
    cores = len(os.sched_getaffinity(0))
    say(f"beside a copy of itself a step takes {contention:+.0%}")
    costs = Costs(
        weights,
        contention,
        cores,
        block_bytes,
        host_s=0.0,
        intake_s=0.0,
        draft_base_s=DRAFT_BASE_S,
        draft_token_s=DRAFT_TOKEN_S,
        acceptance=ACCEPTANCE,
        machine=described(),
        fit=fit,
    )
    host, intake = asyncio.run(_beside(costs, say))
    return replace(costs, host_s=host, intake_s=intake)


def _contention(bench: Bench) -> float:
    """CPU seconds of steps while another process runs the same, over those alone; both take turns."""
    spans = bench.spans(((1, 256, 1),) * 4)
    ratios = []
    child = subprocess.Popen(
        python("-m", "benchmarks.simulate_calibrate"), env=environment({"OMP_NUM_THREADS": "1"}),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        for _ in range(4):
            alone = statistics.median(bench.seconds(spans, TURNS))
            child.stdin.write("go\n")
            child.stdin.flush()
            time.sleep(0.1)
            beside = statistics.median(bench.seconds(spans, TURNS))
            child.stdin.write("stop\n")
            child.stdin.flush()
            child.stdout.readline()
            ratios.append(beside / alone)
    finally:
        child.kill()
        child.wait()
    return max(statistics.median(ratios) - 1.0, 0.0)


def _copy() -> None:
    """The other process: steps between "go" and "stop"."""
    from shared.engine.weights import resolve

    bench = Bench(resolve(DEFAULT_MODEL))
    spans = bench.spans(((1, 256, 1),) * 4)
    print("ready", flush=True)
    while sys.stdin.readline():
        stopped = threading.Event()
        reader = threading.Thread(target=lambda event=stopped: (sys.stdin.readline(), event.set()))
        reader.start()
        while not stopped.is_set():
            bench.engine.step(spans)
        print("stopped", flush=True)


async def _beside(costs: Costs, say: Callable[[str], None]) -> tuple[float, float]:
    """Seconds of a step and of an intake beside the engine, by the CPU time that a real worker takes for one request
    after another: of one token, and of many."""
    from trine.supervisor import Fleet

    with Fleet({"decode": 1}, env={"TRINE_THREADS": "1", "TRINE_DRAFT_DEPTH": "0"}) as fleet:
        await asyncio.to_thread(fleet.wait_ready, READY_S)
        async with Client(fleet.url, fleet.model) as client:
            pid = fleet.pids()["decode-1"]
            await _asked(client, 0, LONG)
            spent = {}
            for tokens in (1, LONG):
                before = cpu_seconds(pid)
                for turn in range(1, ANSWERS + 1):
                    await _asked(client, tokens * 100 + turn, tokens)
                spent[tokens] = (cpu_seconds(pid) - before) / ANSWERS
    prompt = costs.step_s([Span((1,) * PROMPT, 0, (), 1)])
    steps = sum(costs.step_s([Span((1,), PROMPT + i, (), 1)]) for i in range(LONG - 1))
    host = max((spent[LONG] - spent[1] - steps) / (LONG - 1), 0.0)
    intake = max(spent[1] - prompt - host, 0.0) + TRIPS_S
    say(f"beside the engine: {host * 1e3:.1f} ms a step, {intake * 1e3:.1f} ms an intake")
    return host, intake


async def _asked(client: Client, number: int, tokens: int) -> None:
    """A request with a prompt that no other has."""
    ids = [1000 + (number * 977 + i * 31) % 20000 for i in range(PROMPT)]
    async for _ in client.stream(token_ids=ids, max_tokens=tokens, min_tokens=tokens, temperature=0.0):
        pass


def calibrate(path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    costs = measured(say)
    costs.save(path)
    return {"file": str(path), "fit": costs.fit}


if __name__ == "__main__":
    _copy()
