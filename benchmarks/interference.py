"""Do running streams go on while long prompts keep arriving? Trine beside its peers, in the same run.

`python -m benchmarks.interference [--json]`. SmolLM2-135M-Instruct in fp32, on the same cores. Four streams run, and a
prompt of 1,024 tokens that nobody has seen arrives every 5 s, and then every second, which is more than these cores can
do. Each server runs as it comes, and tuned for this by its own documentation; servers of one kind take turns, and
medians of the rounds are given. What counts is the 99th percentile of the time between two tokens of a stream. The bar
is set against the peer for which it is lowest, however that one was started. About 25 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import machine
from benchmarks.bars import judged
from benchmarks.interference_streams import calm, interfered
from benchmarks.peers_runs import Failed, Texts
from benchmarks.peers_servers import Server, Variant, add_options, started
from shared.config import DEFAULT_MODEL
from shared.tokenizer import Tokenizer
from trine.prepare import prepare

EVERY_S: Mapping[float, float] = {5.0: 30.0, 1.0: 20.0}
"""Seconds between two prompts: seconds of a run."""
PROMPT = 1024
WITHOUT: Mapping[Variant, Mapping[str, str]] = {
    "default": {"transformers": "as it comes it answers one request after another: no streams run side by side"}
}
VARIANTS: tuple[Variant, ...] = ("default", "tuned")
Run = dict[str, Any]
Key = tuple[str, Variant, float]
"""Server, how it was started, seconds between prompts."""
P99_BAR, RATE_BAR = 0.6, 0.9


def run_name(key: Key) -> str:
    return f"{key[0]} ({key[1]}), every {key[2]:g} s"


async def rounds(
    servers: Sequence[Server], variant: Variant, options: argparse.Namespace
) -> tuple[dict[Key, list[Run]], dict[str, str]]:
    tokenizer = Tokenizer.load(prepare(DEFAULT_MODEL))
    found: dict[Key, list[Run]] = {}
    failed: dict[str, str] = {}
    number = 0
    for every_s, seconds in EVERY_S.items():
        for _ in range(options.rounds):
            last = number
            for server in servers:
                key = (server.name, variant, every_s)
                if run_name(key) in failed:
                    continue
                texts = Texts(tokenizer, number)
                try:
                    async with server.target() as target:
                        await calm(target)
                        run = await interfered(target, texts, every_s, options.seconds or seconds, options.prompt)
                        found.setdefault(key, []).append(run)
                        await calm(target)  # what it has left to do would slow the next one
                except Failed as error:
                    failed[run_name(key)] = server.failed(error)
                last = max(last, texts.number)
            number = last
    return found, failed


def summed(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians of what the rounds found, and the spread of what counts."""
    values = {name: [run[name] for run in runs if run[name] is not None] for name in runs[0]}
    medians: dict[str, Any] = {name: statistics.median(there) if there else None for name, there in values.items()}
    p99 = values["itl_p99_ms"]
    return {**medians, "itl_p99_lowest_ms": min(p99), "itl_p99_highest_ms": max(p99)}


def against_best(rows: Mapping[Key, Mapping[str, Any]], every_s: float) -> dict[str, Any] | None:
    """Trine, tuned, against the peer whose p99 is lowest; None without either of them."""
    own = rows.get(("Trine", "tuned", every_s))
    peers = {key: row for key, row in rows.items() if key[0] != "Trine" and key[2] == every_s}
    if own is None or not peers:
        return None
    best = min(peers, key=lambda key: peers[key]["itl_p99_ms"])
    return {
        "best_peer": run_name(best),
        "p99": own["itl_p99_ms"] / peers[best]["itl_p99_ms"],
        "rate": own["tokens_per_s"] / peers[best]["tokens_per_s"],
    }


def bars_of(rows: Mapping[Key, Mapping[str, Any]]) -> dict[str, Any]:
    values: dict[str, float] = {}
    bars: dict[str, tuple[str, float]] = {}
    best: dict[str, str] = {}
    for every_s in EVERY_S:
        if (found := against_best(rows, every_s)) is not None:
            name = f"every_{every_s:g}_s"
            best[name] = found["best_peer"]
            values |= {f"p99_ratio_{name}": found["p99"], f"rate_ratio_{name}": found["rate"]}
            bars |= {f"p99_ratio_{name}": ("<=", P99_BAR), f"rate_ratio_{name}": (">=", RATE_BAR)}
    return {"best_peers": best, "bars": judged(values, bars)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    described = machine.described()
    prepare(DEFAULT_MODEL)
    found: dict[Key, list[Run]] = {}
    left_out: dict[str, str] = {}
    told = []
    for variant in options.variants:
        with started(variant, options, WITHOUT.get(variant)) as (servers, missing):
            some, failed = asyncio.run(rounds(servers, variant, options))
            told += [[server.name, variant, server.version, server.settings] for server in servers]
        found |= some
        left_out |= {f"{name} ({variant})": why for name, why in missing.items()} | failed
    rows = {key: summed(runs) for key, runs in found.items()}
    return {
        "machine": described,
        "rounds": options.rounds,
        "servers": told,
        "left_out": left_out,
        "rows": {run_name(key): row for key, row in rows.items()},
        **bars_of(rows),
    }


def table(result: Mapping[str, Any]) -> str:
    lines = [machine.line(result["machine"]), ""]
    lines += [f"{name} {version}, {variant}: {settings}" for name, variant, version, settings in result["servers"]]
    lines += [f"{name}: left out: {why}" for name, why in result["left_out"].items()]
    lines += ["", f"{'':<40}{'p99 ms':>10}{'longest':>10}{'p50 ms':>10}{'tokens/s':>10}{'answered':>12}"]
    for name, row in result["rows"].items():
        answered = f"{row['prompts_answered']:g} of {row['prompts']:g}"
        lines.append(
            f"{name:<40}{row['itl_p99_ms']:>10,.0f}{row['itl_max_ms']:>10,.0f}{row['itl_p50_ms']:>10,.0f}"
            f"{row['tokens_per_s']:>10.1f}{answered:>12}"
        )
    lines += ["", *(f"best peer, {name}: {best}" for name, best in result["best_peers"].items())]
    for name, bar in result["bars"].items():
        verdict = "" if bar["passed"] else "  MISSED"
        lines.append(f"{name:<34}{bar['value']:>10.3f}  bar {bar['bar']}{verdict}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=2, help="default 2")
    parser.add_argument(
        "--seconds", type=float, help="of each run (default: 30 at one prompt in 5 s, 20 at one in 1 s)"
    )
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each prompt that arrives (default 1024)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: both")
    add_options(parser)
    parser.set_defaults(drafters=0)  # with drafts a piece of a stream has several tokens, and pieces are what is seen
    options = parser.parse_args()
    result = run(options)
    print(json.dumps(result) if options.json else table(result))
    sys.exit(0 if all(bar["passed"] for bar in result["bars"].values()) else 1)


if __name__ == "__main__":
    main()
