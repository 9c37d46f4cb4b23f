"""A newcomer's path, timed: from the README's first command on a fresh clone to the first token on the screen.

`python -m benchmarks.newcomer [--json]`. Clones what is committed here into a temporary folder, with no environment and
no converted weights, and runs `make demo` in it. What pip downloads is part of the time: it depends on the network, and
on what pip has in its cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from benchmarks import machine
from shared.bus.embedded import tied

ROOT = Path(__file__).parents[1]
INSTALLED = Path(".venv", ".installed")
"""What `make setup` leaves when it is done."""
PROMPT = b"\n> "
"""The demo writes it before an answer, which follows as it comes."""
DEADLINE_S = 900.0
NOT_A_NEWCOMERS = {"PYTHONPATH", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
"""What is set where this itself runs under `make`: a make inside another says which directory it leaves, on stdout."""
STEPS = {
    "cloned_s": "cloned",
    "installed_s": "everything installed (`make setup`)",
    "first_token_s": "the first token on the screen (`make demo`)",
    "done_s": "the demo is over",
}
"""What is timed, in this order."""


def first_answer(stream: IO[bytes]) -> bool:
    """Reads until the first character of an answer is there. False if the output ends before."""
    seen = b""
    while piece := stream.read(1):
        if seen == PROMPT and piece.strip():
            return True
        if seen != PROMPT:  # what follows may begin with blanks
            seen = (seen + piece)[-len(PROMPT) :]
    return False


def _end(session: int) -> None:
    """All that it has started: pip, or a fleet, which ends in order."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGTERM)


def run(source: Path = ROOT) -> dict[str, Any]:
    """Seconds since the first command. Raises SystemExit when the demo fails, with the last that it said."""
    result: dict[str, Any] = {"machine": machine.described(), "commands": ["git clone …", "make demo"]}
    with tempfile.TemporaryDirectory(prefix="trine-newcomer-") as folder:
        clone, log = Path(folder) / "trine", Path(folder) / "log"
        started, at = time.monotonic(), time.time()
        subprocess.run(["git", "clone", "-q", str(source), str(clone)], check=True)
        result["cloned_s"] = time.monotonic() - started
        env = {k: v for k, v in os.environ.items() if not k.startswith("TRINE_") and k not in NOT_A_NEWCOMERS}
        env |= {"TRINE_CACHE_DIR": str(Path(folder) / "cache"), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as errors:
            make = subprocess.Popen(
                tied([shutil.which("make") or "make", "demo"]),
                cwd=clone,
                env=env,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )
        limit = threading.Timer(DEADLINE_S, _end, [make.pid])
        limit.start()
        try:
            assert make.stdout is not None
            told = first_answer(make.stdout)
            result["first_token_s"] = time.monotonic() - started
            make.stdout.read()
            failed = make.wait() != 0 or not told
        finally:
            limit.cancel()
            _end(make.pid)
        result["done_s"] = time.monotonic() - started
        if failed:
            raise SystemExit(f"make demo failed:\n{log.read_text(errors='replace')[-2000:]}")
        result["installed_s"] = (clone / INSTALLED).stat().st_mtime - at
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = run()
    if options.json:
        print(json.dumps(result))
        return
    print(machine.line(result["machine"]))
    for name, what in STEPS.items():
        print(f"{what:<48}{result[name]:>8.1f} s")


if __name__ == "__main__":
    main()
