"""How fast the engine decodes on this CPU, next to plain `transformers`, and where a step's time goes.

`python -m benchmarks.decode [--json] [--threads N]`. SmolLM2-135M-Instruct in fp32, all in one process with the same
threads. Contestants take turns, so that a busy neighbour slows all of them; ratios are medians over the turns of what
was measured side by side, with the smallest and the largest. Against `transformers` it is whole calls that count,
prompts included; what int8 weights and verified drafts cost is told from decoding steps alone, with 256 tokens of
context. With one thread, which is what a worker of several on two cores gets, it is CPU time that is measured, so that
neighbours do not count; with more it is time on the wall, which means little on a busy machine.

Compared with other servers in fp32 (2 threads, another CPU of the same class; tokens/s at batch 1 / 8 concurrent):
llama.cpp 31 / 95, vLLM 20 / 89, `transformers serve` 20 / 50. At batch 1 llama.cpp is the one to beat, by about a
half. All have to read the 540 MB of weights once per step; llama.cpp adds next to nothing to that, while here a third
of a step at batch 1 is not products: a fifth lies between kernels, in the Python of 30 transformers layers ("rest" in
the table of shares), the others are attention and norms. That share falls as the batch grows.

On this kind of CPU verified drafts cost less with two threads (1.2 and 1.4 for 5 and 9 rows, on a quiet machine) than
with one, where arithmetic is what limits them and single rows, by column, keep up with memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from benchmarks.bars import judged
from shared.engine.threads import openmp

BARS: dict[str, tuple[str, float]] = {
    "ratio_vs_transformers": (">=", 1.05),
    "ratio_vs_transformers_batch8": (">=", 1.3),
    "int8_weights_over_fp32": (">=", 1.2),
    "int8_weights_over_fp32_batch8": (">=", 1.2),
    "int8_weights_perplexity_ratio": ("<=", 1.04),
    "verify_5_over_1": ("<=", 1.5),
    "verify_9_over_1": ("<=", 1.9),
}


def machine(threads: int) -> dict[str, Any]:
    import torch
    import transformers

    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads,
        "clock": "CPU" if threads == 1 else "wall",
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "openmp": {name: os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")},
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return " ".join([name, *(flag for flag in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if flag in flags)])


def table(result: dict[str, Any]) -> str:
    spread = result["spread"]
    lines = [", ".join(f"{key} {value}" for key, value in result["machine"].items()), ""]
    for name, bar in result["bars"].items():
        low, high = spread.get(name, (bar["value"], bar["value"]))
        verdict = "" if bar["passed"] else "  MISSED"
        lines.append(f"{name:<34}{bar['value']:>8.3f}  ({low:.3f} .. {high:.3f})  bar {bar['bar']}{verdict}")
    for title, unit in (
        ("tokens_per_second", "tokens/s"), ("engine_steps", "ms"), ("codec_steps", "ms"), ("shares", "of the step")
    ):  # fmt: skip
        lines += ["", f"{title} ({unit})"]
        for name, row in result[title].items():
            cells = "  ".join(f"{key} {value:.3g}" for key, value in row.items())
            lines.append(f"  {name:<26}{cells}")
    lines += ["", f"linear layers: {result['linear_layers']}; load: " + ", ".join(
        f"{name} {seconds:.1f} s" for name, seconds in result["load_seconds"].items()
    )]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1, help="of every contestant (1)")
    arguments = parser.parse_args()
    if arguments.threads < 1:
        parser.error("--threads must be at least 1")
    os.environ.update(openmp(arguments.threads, os.environ))
    from benchmarks.decode_runs import run  # torch, which reads the environment now

    result = {"machine": machine(arguments.threads), **run(arguments.threads)}
    result["bars"] = judged(result, BARS)
    print(json.dumps(result) if arguments.json else table(result))
    sys.exit(0 if all(bar["passed"] for bar in result["bars"].values()) else 1)


if __name__ == "__main__":
    main()
