"""Coverage-guided fuzzing: all families of decoders in turn, each in a process of its own, round after round.

    python -m tests.fuzz [--minutes M | --seconds S] [--seed N] [TARGET ...]

What a target has learned in one round it begins with in the next. A finding is kept in the folder printed, as a file
`crash-*`, `timeout-*` or `oom-*`; its target has no further turn, and the run fails in the end.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.targets import BOMBS, TARGETS, target

ROUND_S = 30
"""Of one target. Some need ten seconds to start."""
RSS_MB = 2048
INPUT_S = 10
EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")

MOVES = re.compile(r"#\d+\s|INFO: ")
"""How libFuzzer tells that it gets on."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all of them by default")
    parser.add_argument("--minutes", type=float, default=5.0, help="for all of them together")
    parser.add_argument("--seconds", type=int, help="for each, in a single round")
    parser.add_argument("--seed", type=int, help="of the first round; each further one has the next")
    asked = parser.parse_args()
    names = asked.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}")
    seed = random.randrange(1, 1 << 30) if asked.seed is None else asked.seed
    folder = Path(tempfile.mkdtemp(prefix="trine-fuzz-"))
    targets = [_Target(name, folder) for name in names]
    ends = time.monotonic() + asked.minutes * 60
    while True:
        _round(targets, seed, ends, asked.seconds)
        seed += 1
        if asked.seconds or time.monotonic() >= ends or all(one.found for one in targets):
            break
    for one in targets:
        print(f"{one.name}: {one.executed} inputs{', FINDING' if one.found else ''}")
    found = [one.name for one in targets if one.found]
    print(f"findings in: {', '.join(found)}; see {folder}" if found else "nothing found")
    return len(found)


def _round(targets: list[_Target], seed: int, ends: float, seconds: int | None) -> None:
    """Whoever is still to have a turn shares what time is left."""
    waiting = [one for one in targets if not one.found]
    for number, one in enumerate(waiting):
        share = (ends - time.monotonic()) / (len(waiting) - number) - one.starts_in
        one.run(seed, seconds or max(1, min(ROUND_S, round(share))))


class _Target:
    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.executed = 0
        self.found = False
        self.starts_in = 5.0
        """Seconds, about, until its process does anything."""
        self._folder = folder / name
        self._corpus = self._folder / "corpus"
        self._corpus.mkdir(parents=True)
        for number, seed in enumerate((*target(name).seeds(), *BOMBS)):
            (self._corpus / f"seed-{number}").write_bytes(seed)

    def run(self, seed: int, seconds: int) -> None:
        print(f"{self.name}: {seconds} s, seed {seed}, in {self._folder}", flush=True)
        options = (
            f"-max_total_time={seconds}", f"-seed={seed}", f"-artifact_prefix={self._folder}/", f"-timeout={INPUT_S}",
            f"-rss_limit_mb={RSS_MB}", "-max_len=16384", "-print_final_stats=1",
        )  # fmt: skip
        command = [sys.executable, "-m", "tests.fuzz.one", self.name, *options, str(self._corpus)]
        began = time.monotonic()
        ran = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds + 180,
            env={**os.environ, "TMPDIR": str(self._folder)},  # libFuzzer ends the process before it has tidied up
        )
        said = ran.stdout
        self.executed += sum(int(number) for number in EXECUTED.findall(said))
        if ran.returncode:
            self.found = True
            lines = [line for line in said.splitlines() if not MOVES.match(line)]
            print("\n".join([f"ended with {ran.returncode}", *lines[-40:]]))
        else:
            self.starts_in = time.monotonic() - began - seconds


if __name__ == "__main__":
    sys.exit(main())
