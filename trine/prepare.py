"""Get a model's weights ready once, before any worker starts. Done in a child process: converting needs torch.

`python -m trine.prepare MODEL` writes one JSON object a line: progress, and at last the folder or an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shared.errors import ModelError, TrineError, from_code
from trine.process import environment, python

Progress = Callable[[str, float], None]


def prepare(model: str, progress: Progress = lambda stage, done: None) -> Path:
    """The folder of `model`, downloaded or converted if need be; `progress` gets a stage and 0 to 1. Blocking.

    Raises ModelError saying what would help.
    """
    child = subprocess.Popen(
        python("-m", "trine.prepare", model),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment({}),
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        for line in child.stdout:
            report = json.loads(line)
            if "folder" in report:
                return Path(report["folder"])
            if "error" in report:
                raise from_code(report["code"], report["error"])
            progress(report["stage"], report["done"])
        _, errors = child.communicate()
        last = errors.strip().splitlines()[-1:] or ["no output"]
        raise ModelError(f"preparing {model} ended with exit code {child.returncode}: {last[0]}")
    finally:
        child.kill()
        child.communicate()


def main() -> None:
    """The child's side."""
    from shared.engine.weights import resolve

    def report(**fields: object) -> None:
        print(json.dumps(fields), flush=True)

    try:
        folder = resolve(sys.argv[1], lambda stage, done: report(stage=stage, done=done))
    except TrineError as error:
        report(error=error.message, code=error.code)
    else:
        report(folder=str(folder))


if __name__ == "__main__":
    main()
