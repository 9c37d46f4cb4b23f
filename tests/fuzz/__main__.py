"""Coverage-guided fuzzing, a process for each family of decoders.

    python -m tests.fuzz [--minutes M | --seconds S] [TARGET ...]

A finding ends its process with the bytes in a file `crash-*` of the folder printed; the run then fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.targets import BOMBS, TARGETS

RSS_MB = 1024
INPUT_S = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all of them by default")
    parser.add_argument("--minutes", type=float, default=5.0, help="for all of them together")
    parser.add_argument("--seconds", type=int, help="for each")
    asked = parser.parse_args()
    names = asked.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}")
    seconds = asked.seconds or max(1, round(asked.minutes * 60 / len(names)))
    found = [name for name in names if not _clean(name, seconds)]
    print("findings in: " + ", ".join(found) if found else f"{len(names)} targets, {seconds} s each: nothing found")
    return len(found)


def _clean(name: str, seconds: int) -> bool:
    folder = Path(tempfile.mkdtemp(prefix=f"trine-fuzz-{name}-"))
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate((*TARGETS[name].seeds(), *BOMBS)):
        (corpus / f"seed-{number}").write_bytes(seed)
    print(f"{name}: {seconds} s, in {folder}", flush=True)
    options = (
        f"-max_total_time={seconds}", f"-artifact_prefix={folder}/", f"-rss_limit_mb={RSS_MB}", f"-timeout={INPUT_S}",
        "-max_len=16384", "-print_final_stats=1",
    )  # fmt: skip
    command = [sys.executable, "-m", "tests.fuzz.one", name, *options, str(corpus)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=seconds + 120)
    lines = (ran.stdout + ran.stderr).splitlines()
    print("\n".join([line for line in lines if "number_of_executed" in line] if not ran.returncode else lines[-40:]))
    return ran.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
