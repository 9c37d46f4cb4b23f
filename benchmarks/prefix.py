"""What the shared prefix cache saves, and what sharing it costs: seen by a client, over NATS.

`python -m benchmarks.prefix [--overlap | --affinity] [--json]`. SmolLM2-135M-Instruct, KV as it is, native weights;
real processes with one thread each and a nats-server of their own. Some minutes.

Without options: the time to the first token of a prompt of 1,024 tokens, cold (computed by a prefill worker) and warm,
from the same decode worker, from another one through the machine's memory, and from one that has NATS alone; then 40
questions over 5 contexts and 40 tasks for one list of tools, one at a time, next to some of the same requests that
share nothing. Cold and warm take turns, so that a busy neighbour slows both; medians are given.

`--overlap`: the share of the time to the first token of a remote prefill in which no forward pass ran, neither in the
prefill worker nor in the decode worker.

`--affinity`: conversations on two decode workers that share no memory, with affinity and without.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.bars import Bars, judged, tabled
from benchmarks.prefix_affinity import measure_affinity
from benchmarks.prefix_runs import measure_overlap, measure_reuse, measure_sets
from shared.config import DEFAULT_MODEL
from shared.tokenizer import Tokenizer
from trine.prepare import prepare

Measure = Callable[[Tokenizer], dict[str, Any]]
"""Results by name, those with a bar among them, and under "rows" tables of names and numbers."""


@dataclass(frozen=True, slots=True)
class Part:
    measures: tuple[Measure, ...]
    bars: Bars


PARTS: dict[str, Part] = {
    "reuse": Part(
        (measure_reuse, measure_sets),
        {
            "warm_over_cold_same_worker": ("<=", 0.08),
            "warm_over_cold_host_tier": ("<=", 0.12),
            "warm_over_cold_nats": ("<=", 0.20),
            "rag_cached_share": (">=", 0.85),
            "rag_ttft_ratio": ("<=", 0.2),
            "agent_cached_share": (">=", 0.85),
            "agent_ttft_ratio": ("<=", 0.2),
        },
    ),
    "overlap": Part(
        (measure_overlap,),
        {"overhead_512": ("<=", 0.15), "overhead_2048": ("<=", 0.15), "overhead_4096": ("<=", 0.15)},
    ),
    "affinity": Part((measure_affinity,), {}),
}


def run(part: Part) -> dict[str, Any]:
    tokenizer = Tokenizer.load(prepare(DEFAULT_MODEL))
    result: dict[str, Any] = {"cores": os.cpu_count(), "load_average_before": os.getloadavg()[0], "rows": {}}
    for measure in part.measures:
        found = measure(tokenizer)
        result["rows"] |= found.pop("rows")
        result |= found
    result["bars"] = judged(result, part.bars)
    return result


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['cores']} cores, load average {result['load_average_before']:.1f} before the run", ""]
    return "\n".join(lines + tabled(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--overlap", dest="part", action="store_const", const="overlap", help="remote prefill instead")
    which.add_argument("--affinity", dest="part", action="store_const", const="affinity", help="conversations instead")
    parser.set_defaults(part="reuse")
    arguments = parser.parse_args()
    result = run(PARTS[arguments.part])
    print(json.dumps(result) if arguments.json else table(result))
    sys.exit(0 if all(bar["passed"] for bar in result["bars"].values()) else 1)


if __name__ == "__main__":
    main()
