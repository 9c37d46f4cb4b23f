"""All that needs a GPU to be known, in one run of a few minutes and one table.

`python -m benchmarks.gpu_check [--json] [--dry-run]`: errors of the kernels, addresses beyond 32 bits, bandwidth
against a copy on the same device, sampling, and an 8B-shaped model with random weights against transformers. Needs
about 60 GB of GPU memory. Exits with 0 when all is well, 1 when a check failed, 2 without a GPU.

`--dry-run` goes through the same code on the CPU, with tiny sizes in Triton's interpreter; its times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.gpu.report import Check, Report, give_up, run

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench

BUDGET_S, LIMIT_S = 330.0, 355.0
"""No check begins that would end later than the first; the second ends the run."""


def checks(bench: Bench) -> list[Check]:
    """The most telling first: what there is no time for is skipped. Seconds are guesses for one H200."""
    from transformers import DynamicCache, StaticCache

    from benchmarks.gpu import bandwidth, kernels
    from benchmarks.gpu.model import ModelChecks
    from shared.engine.codecs.registry import CODECS

    model = ModelChecks(bench)
    found = [
        *(Check(f"kernel errors, {c.name}", partial(kernels.errors, bench, c), 25) for c in CODECS.values()),
        Check("addresses beyond 32 bits", partial(kernels.addressing, bench), 10),
        Check("copy", partial(bandwidth.copy, bench), 3),
        Check("sampling", partial(bandwidth.sampling, bench), 10),
        Check("model", model.build, 20),
        Check("captured steps", model.exact, 10),
        Check("decode", partial(model.decoding, graphs=True), 20),
        Check("decode, eager", partial(model.decoding, graphs=False), 15),
        Check("prefill", model.prefilling, 10),
        Check("transformers, sdpa, static cache", partial(model.peer, StaticCache), 20),
        Check("transformers, sdpa, dynamic cache", partial(model.peer, DynamicCache), 20),
        Check("verify", model.verifying, 15),
        *(Check(f"decode, {name}", partial(model.with_codec, name), 10) for name in CODECS),
        Check("attention", partial(bandwidth.attending, bench), 40),
        Check("write", partial(bandwidth.writing, bench), 10),
        Check("transformers, sdpa, static cache, compiled", partial(model.peer, StaticCache, compiled=True), 90),
    ]
    return found if bench.cuda else found[:-1]  # compiling tells nothing without a GPU


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_check", description="Check kernels and speed on a GPU.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    arguments = parser.parse_args()
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import torch

    if not arguments.dry_run and not torch.cuda.is_available():
        print("there is no GPU that torch can use; --dry-run goes through the checks on the CPU", file=sys.stderr)
        return 2
    from benchmarks.gpu.bench import DRY, Bench, Sizes

    bench = Bench(torch.device("cpu" if arguments.dry_run else "cuda"), DRY if arguments.dry_run else Sizes())
    device = "cpu, dry run" if arguments.dry_run else torch.cuda.get_device_name()
    report = Report()

    def show() -> None:
        more = {"device": device, "torch": torch.__version__}
        print(report.json(**more) if arguments.json else f"{device}\n{report.table()}", flush=True)

    limit = threading.Timer(LIMIT_S, give_up, (report, show))
    limit.daemon = True
    limit.start()
    run(report, checks(bench), BUDGET_S, lambda text: print(text, file=sys.stderr, flush=True))
    limit.cancel()
    show()
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
