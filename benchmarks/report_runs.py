"""Which benchmarks the report is made of, and how each is run and kept."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import machine
from shared.bus.embedded import tied

RESULTS = Path(__file__).parent / "results"
LONGER = 3.0
"""A benchmark that takes so many times as long as it should on two cores is ended."""
Saved = Mapping[str, Any]
"""A run that is kept: "command", "at" (UTC), "took_s", "machine", and "result" as the benchmark told it."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """`python -m benchmarks.NAME`, or what `words` say. `minutes`: about how long on two cores. `extra`: not part of
    every report."""

    name: str
    minutes: float
    meaning: str
    peers: bool = False
    extra: bool = False
    words: str = ""

    @property
    def command(self) -> str:
        return f"python -m benchmarks.{self.words or self.name} --json"


BENCHMARKS = (
    Benchmark(
        "prefix", 6, "The time to the first token of a prompt that others have computed before, and of a new one."
    ),
    Benchmark("kv_quant", 4, "What KV in 8 or 4 bits saves, and how far it moves the model's predictions."),
    Benchmark("memory", 1, "How many places of KV blocks in use hold no token."),
    Benchmark(
        "speculation", 12, "Tokens per second with a drafter over those without: where drafts help, and where not."
    ),
    Benchmark("decode", 6, "The engine alone beside plain `transformers`, and where the time of a step goes."),
    Benchmark("transfer", 2, "How fast KV blocks move through NATS and through one machine's memory."),
    Benchmark("gateway", 2, "What the gateway adds to plain NATS."),
    Benchmark("failover", 3, "How long requests wait when a NATS cluster loses a leader."),
    Benchmark(
        "simulate", 1, "What more workers and machines bring, played with the real schedulers on a virtual clock."
    ),
    Benchmark(
        "simulate_check",
        9,
        "How far what is simulated is from real fleets of one and two workers on this machine.",
        extra=True,
        words="simulate --check",
    ),
    Benchmark(
        "newcomer", 6, "From the README's first command on a fresh clone to the first token on the screen.", extra=True
    ),
    Benchmark(
        "peers", 16, "Trine beside other servers: same weights, same cores, same load, in turn.", peers=True, extra=True
    ),
    Benchmark(
        "interference",
        25,
        "Whether running answers go on while long prompts keep arriving, beside other servers.",
        peers=True,
        extra=True,
    ),
)


def measured(benchmark: Benchmark, arguments: Sequence[str], say: Callable[[str], None]) -> Saved | None:
    """Runs one and returns what is to be kept; None if it told nothing. A missed bar is a result like any other."""
    before, started = machine.described(), time.monotonic()
    words = [sys.executable, *benchmark.command.split()[1:], *(arguments if benchmark.peers else ())]
    say(f"{benchmark.name}: about {benchmark.minutes:g} min")
    try:
        done = subprocess.run(
            tied(words), check=False, stdout=subprocess.PIPE, text=True, timeout=LONGER * 60 * benchmark.minutes
        )
    except subprocess.TimeoutExpired as error:
        say(f"{benchmark.name}: ended after {error.timeout:.0f} s")
        return None
    took = time.monotonic() - started
    if (result := told(done.stdout)) is None:
        say(f"{benchmark.name}: no result, exit code {done.returncode}")
        return None
    say(f"{benchmark.name}: {took:.0f} s")
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return {"command": benchmark.command, "at": at, "took_s": round(took), "machine": before, "result": result}


def told(output: str) -> dict[str, Any] | None:
    """The JSON object in the last line of what a benchmark wrote."""
    lines = output.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


_REASONS = ("missing", "failed", "left_out")
"""Where a result says by name why somebody is not in it."""
_PATH = re.compile(r"(?<![\w.])/[^\s:;,'\"]+")


def public(result: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is of this machine alone: paths in reasons, and the last words of other servers after them."""
    said = {name: result[name] for name in _REASONS if isinstance(result.get(name), Mapping)}
    short = {
        name: {who: _PATH.sub("…", str(why).partition("; it said last")[0].strip()) for who, why in reasons.items()}
        for name, reasons in said.items()
    }
    return {**result, **short}


def keep(name: str, saved: Saved, folder: Path = RESULTS) -> None:
    saved = {**saved, "result": public(saved["result"])}
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(saved, indent=1) + "\n")


def kept(folder: Path = RESULTS) -> dict[str, Saved]:
    """By name of a benchmark: its last run, if there is one."""
    files = {b.name: folder / f"{b.name}.json" for b in BENCHMARKS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
