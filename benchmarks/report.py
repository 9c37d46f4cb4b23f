"""All benchmarks, and the report: `make bench`, or `python -m benchmarks.report [--only NAME ...] [--draw]`.

Runs one after another (under 45 minutes on two cores), keeps what each says in benchmarks/results, and writes of all
that is there docs/results.md, its pictures, and the README's table. `--draw` writes them without running anything.
Those beside peers (docs/benchmarks.md says how to install them), and the newcomer's path, run when they are named;
their last results are shown, with their dates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers_servers import add_options
from benchmarks.report_page import headline, page, with_headline
from benchmarks.report_plots import drawn
from benchmarks.report_runs import BENCHMARKS, Saved, keep, kept, measured

ROOT = Path(__file__).parents[1]
NAMES = tuple(benchmark.name for benchmark in BENCHMARKS)


def run(names: tuple[str, ...], arguments: list[str]) -> list[str]:
    """Runs these and keeps what they say. Returns those that said nothing."""
    silent = []
    for benchmark in BENCHMARKS:
        if benchmark.name not in names:
            continue
        if (saved := measured(benchmark, arguments, _say)) is None:
            silent.append(benchmark.name)
        else:
            keep(benchmark.name, saved)
    return silent


def write(results: Mapping[str, Saved], root: Path = ROOT) -> list[Path]:
    """The page, its pictures and the README's table. Returns what was written."""
    docs, readme = root / "docs", root / "README.md"
    pictures = docs / "images" / "results"
    pictures.mkdir(parents=True, exist_ok=True)
    files = {docs / "results.md": page(results), readme: with_headline(readme.read_text(), headline(results))}
    files |= {pictures / name: text for name, text in drawn(results).items()}
    for stray in set(pictures.iterdir()) - set(files):
        stray.unlink()
    for file, text in files.items():
        file.write_text(text)
    return list(files)


def peer_arguments(options: argparse.Namespace) -> list[str]:
    found = []
    for name in ("vllm_python", "llama_server", "transformers_python"):
        if value := getattr(options, name):
            found += [f"--{name.replace('_', '-')}", value]
    return found + (["--only", *options.peers] if options.peers is not None else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"these alone: {', '.join(NAMES)}")
    parser.add_argument("--draw", action="store_true", help="run nothing: write the report of what is there")
    add_options(parser, only="--peers")
    options = parser.parse_args()
    wanted = tuple(options.only or (benchmark.name for benchmark in BENCHMARKS if not benchmark.extra))
    silent = run(() if options.draw else wanted, peer_arguments(options))
    for file in write(kept()):
        _say(f"wrote {file.relative_to(ROOT)}")
    if silent:
        sys.exit(f"no result: {', '.join(silent)}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
