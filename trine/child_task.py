"""Work that needs torch, done in a child process, so that the command line never loads it.

The child writes one JSON object a line: progress, and at last the result or a typed error.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import TrineError, from_code
from trine.process import environment, python

Progress = Callable[[str, float], None]
"""Called with a stage and how much of it is done, 0 to 1."""


def silent(stage: str, done: float) -> None:
    """A Progress that tells nobody."""


def run(module: str, *arguments: str, env: Mapping[str, str] | None = None, progress: Progress = silent) -> Any:
    """The result of `python -m module arguments`, which must call `serve`. Blocking.

    Raises the error that the work raised, TrineError when the child ended without a word.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = subprocess.Popen(
            python("-m", module, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment(env or {}),
            text=True,
            start_new_session=True,
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                report = json.loads(line)
                if "result" in report:
                    return report["result"]
                if "error" in report:
                    raise from_code(report["code"], report["error"], report["field"])
                progress(report["stage"], report["done"])
            child.wait()
            said.seek(0)
            last = said.read().strip().splitlines()[-1:] or ["no output"]
            raise TrineError(f"{module} ended with exit code {child.returncode}: {last[0]}")
        finally:
            child.kill()
            child.communicate()


def serve(work: Callable[[Progress], object]) -> None:
    """The child's side: do `work`, whose result must be JSON, and report."""

    out, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed, a log line for one, is no report

    def report(**fields: object) -> None:
        print(json.dumps(fields), file=out, flush=True)

    try:
        result = work(lambda stage, done: report(stage=stage, done=done))
    except TrineError as error:
        report(error=error.message, code=error.code, field=error.field)
    else:
        report(result=result)
