"""What drafting gains where it can, and costs where it cannot: seen by a client, over NATS.

`python -m benchmarks.speculation [--coupling [--plot FILE]] [--json]`. SmolLM2-135M-Instruct, KV as it is, native
weights; real processes with one thread each and a nats-server of their own. About ten minutes.

Without options: tokens per second after the first, with a drafter and without, of summaries and quotations, edits of
code and open chat, one request at a time; of 8 chats at once; with a drafter that is useless; and while a drafter is
frozen. Two stacks that differ by the drafter alone take turns, request by request, so that a busy neighbour slows both.
The texts are compared too, also at temperatures above 0. Speeds of a set are totals, since answers differ in how much
drafts help them; where drafts cannot help, the median over requests counts. A control without any drafter shows what
the machine's noise comes to. The drafter is the one that comes with Trine, unless TRINE_DRAFTER_MODEL,
TRINE_DRAFT_SOURCE and TRINE_DRAFTER_LAYERS ask for another.

`--coupling`: how often target and drafter choose the same token when they share the noise, against the bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bars import Bars, judged, tabled
from benchmarks.speculation_coupling import measure_coupling, plot
from benchmarks.speculation_runs import measure_speculation
from services.drafter.config import DrafterSettings
from shared.config import DEFAULT_MODEL
from shared.tokenizer import Tokenizer
from trine.prepare import prepare

Measure = Callable[[Tokenizer], dict[str, Any]]
"""Results by name, those with a bar among them, and under "rows" tables of names and numbers."""


@dataclass(frozen=True, slots=True)
class Part:
    measure: Measure
    bars: Bars


PARTS: dict[str, Part] = {
    "speed": Part(
        measure_speculation,
        {
            "quote_speed": (">=", 1.4),
            "edit_speed": (">=", 1.4),
            "chat_speed": (">=", 1.10),
            "batch_speed": (">=", 0.97),
            "frozen_speed": (">=", 0.9),
            "useless_speed": (">=", 0.97),
            "texts_parted_not_at_a_tie": ("<=", 0),
        },
    ),
    "coupling": Part(measure_coupling, {"least_above_bound": (">=", -0.02), "least_below_optimum": (">=", -0.02)}),
}


def run(part: Part) -> dict[str, Any]:
    tokenizer = Tokenizer.load(prepare(DEFAULT_MODEL))
    result: dict[str, Any] = {"cores": os.cpu_count(), "load_average_before": os.getloadavg()[0]}
    settings = DrafterSettings()
    result["drafter"] = {
        "source": settings.draft_source,
        "model": settings.drafter_model or "the one that comes with Trine",
    }
    result |= part.measure(tokenizer)
    result["bars"] = judged(result, part.bars)
    return result


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['cores']} cores, load average {result['load_average_before']:.1f} before the run"]
    lines += [f"drafter: {result['drafter']['source']}, {result['drafter']['model']}", ""]
    return "\n".join(lines + tabled(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--coupling", action="store_true", help="shared noise instead")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG file of that; needs matplotlib")
    arguments = parser.parse_args()
    if arguments.plot and not arguments.coupling:
        parser.error("--plot is for --coupling")
    result = run(PARTS["coupling" if arguments.coupling else "speed"])
    if arguments.plot:
        plot(result, arguments.plot)
    print(json.dumps(result) if arguments.json else table(result))
    sys.exit(0 if all(bar["passed"] for bar in result["bars"].values()) else 1)


if __name__ == "__main__":
    main()
