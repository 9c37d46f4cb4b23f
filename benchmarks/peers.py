"""Trine beside its peers: same weights, same dtype, same cores, same load, in the same run.

`python -m benchmarks.peers [--json]`. SmolLM2-135M-Instruct in fp32; vLLM, llama.cpp and `transformers`, as far as they
are installed, each started as it comes (docs/benchmarks.md says how to install them). All servers run during the whole
time; each row is measured on one after another, then the next round. Medians of the rounds. About 15 minutes.
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
from benchmarks.peers_runs import ROWS, Failed, Texts, measure
from benchmarks.peers_servers import Server, add_options, started
from shared.config import DEFAULT_MODEL
from shared.tokenizer import Tokenizer
from trine.prepare import prepare

Rounds = Mapping[str, Sequence[float]]
"""By name of a row: what each round found."""


async def rounds(servers: Sequence[Server], count: int, small: bool) -> tuple[dict[str, dict[str, list[float]]], Any]:
    """(by server and row: what each round found; by server: why it failed, if it did)"""
    tokenizer = Tokenizer.load(prepare(DEFAULT_MODEL))
    found: dict[str, dict[str, list[float]]] = {server.name: {} for server in servers}
    failed: dict[str, str] = {}
    number = last = 0
    for turn in range(-1, count):  # the one before the first warms up
        for server in servers:
            if server.name in failed:
                continue
            texts = Texts(tokenizer, number)
            try:
                async with server.target() as target:
                    values = await measure(target, texts, small or turn < 0)
            except Failed as error:
                failed[server.name] = server.failed(error)
                continue
            last = texts.number
            if turn >= 0:
                for name, value in values.items():
                    found[server.name].setdefault(name, []).append(value)
        number = last
    return found, failed


def compared(found: Mapping[str, Rounds]) -> dict[str, Any]:
    """By row: each server's median and spread, Trine's ratio to each other, and who is best."""
    rows: dict[str, Any] = {}
    for name, row in ROWS.items():
        there = {server: values[name] for server, values in found.items() if values.get(name)}
        if not there:
            continue
        medians = {server: statistics.median(values) for server, values in there.items()}
        own = medians.get("Trine")
        rows[name] = {
            "title": row.title,
            "servers": {
                server: {"median": medians[server], "lowest": min(values), "highest": max(values)}
                for server, values in there.items()
            },
            "trine_over": {s: own / value for s, value in medians.items() if s != "Trine"} if own else {},
            "best": (max if row.higher else min)(medians, key=lambda server: medians[server]),
        }
    return rows


def run(options: argparse.Namespace) -> dict[str, Any]:
    described = machine.described()
    prepare(DEFAULT_MODEL)
    with started("default", options) as (servers, missing):
        before = {server.name: server.cpu_seconds for server in servers}
        found, failed = asyncio.run(rounds(servers, options.rounds, options.small))
        told = [
            {
                "name": server.name,
                "version": server.version,
                "settings": server.settings,
                "pss_mb": server.pss_mb,
                "cpu_seconds": server.cpu_seconds - before[server.name],
            }
            for server in servers
        ]
    return {
        "machine": described,
        "rounds": options.rounds,
        "servers": told,
        "missing": missing,
        "failed": failed,
        "rows": compared(found),
    }


def table(result: Mapping[str, Any]) -> str:
    names = [server["name"] for server in result["servers"]]
    lines = [machine.line(result["machine"]), ""]
    lines += [f"{s['name']} {s['version']} ({s['settings']}): {s['pss_mb']:,.0f} MB" for s in result["servers"]]
    lines += [f"{name}: left out: {why}" for name, why in result["missing"].items()]
    lines += [f"{name}: failed: {why}" for name, why in result["failed"].items()]
    lines += ["", f"{'':<44}" + "".join(f"{name:>14}" for name in names) + "  best"]
    for row in result["rows"].values():
        cells = [row["servers"].get(name) for name in names]
        shown = "".join(f"{cell['median']:>14,.1f}" if cell else f"{'–':>14}" for cell in cells)
        lines.append(f"{row['title']:<44}{shown}  {row['best']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--small", action="store_true", help="few tokens: to see that everything runs")
    add_options(parser)
    parser.set_defaults(drafters=1)  # as `trine up` comes
    options = parser.parse_args()
    result = run(options)
    print(json.dumps(result) if options.json else table(result))
    sys.exit(0 if "Trine" not in result["failed"] else 1)


if __name__ == "__main__":
    main()
