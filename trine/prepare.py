"""Get a model's weights ready once, before any worker starts. Done in a child process: converting needs torch."""

from __future__ import annotations

import sys
from pathlib import Path

from trine import child_task
from trine.child_task import Progress, silent


def prepare(model: str, progress: Progress = silent) -> Path:
    """The folder of `model`, downloaded or converted if need be. Blocking.

    Raises ModelError saying what would help.
    """
    return Path(child_task.run("trine.prepare", model, progress=progress))


def _folder(progress: Progress) -> str:
    from shared.engine.weights import resolve

    return str(resolve(sys.argv[1], progress))


if __name__ == "__main__":
    child_task.serve(_folder)
