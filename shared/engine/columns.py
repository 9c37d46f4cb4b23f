"""Weights stored column by column, in a file of the cache folder that all processes of a computer map.

The file is written once, aside and under a lock, and then renamed: who finds it finds it whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shared.config import cache_home
from shared.engine.merged import Run

_VERSION = 1
_WRITE_DEADLINE_S = 300.0


def by_column(digest: str, runs: Mapping[str, Run]) -> list[Tensor]:
    """The weights of each run, [out, in] with the columns contiguous; mapped, if the cache folder can be used.

    `digest` names the weights of the whole model: other weights must have another one. "": nothing is shared.
    """
    if digest:
        layout = {name: run.sizes for name, run in runs.items()}
        name = hashlib.sha256(json.dumps([_VERSION, digest, layout]).encode()).hexdigest()[:32]
        path = cache_home() / "columns" / f"{name}.safetensors"
        try:
            if not path.exists():
                _write(path, runs)
            return _mapped(path, list(runs))
        except (OSError, Timeout, SafetensorError):
            pass  # costs memory, nothing else
    return [run.weight().t().contiguous().t() for run in runs.values()]


def _mapped(path: Path, names: list[str]) -> list[Tensor]:
    with safe_open(path, framework="pt") as file:
        return [file.get_tensor(name).t() for name in names]


def _write(path: Path, runs: Mapping[str, Run]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=_WRITE_DEADLINE_S):
        if path.exists():
            return
        for leftover in path.parent.glob(f".{path.name}.part-*"):  # of a process that died while it held the lock
            leftover.unlink(missing_ok=True)
        descriptor, part = tempfile.mkstemp(prefix=f".{path.name}.part-", dir=path.parent)
        os.close(descriptor)
        try:
            save_file({name: run.weight().t().contiguous() for name, run in runs.items()}, part)
            Path(part).replace(path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
