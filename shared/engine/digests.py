"""SHA-256 of large files, computed once: cached by path, size and modification time. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from shared.config import cache_home

_CHUNK = 1 << 22


def file_digest(path: Path) -> str:
    """SHA-256 of the file's bytes, hexadecimal."""
    return cached("file", path, _digest)[0]


def cached(kind: str, path: Path, compute: Callable[[Path], list[str]]) -> list[str]:
    """`compute(path)`, remembered in the cache folder until the file's size or modification time changes.

    A cache that cannot be read or written costs time, nothing else.
    """
    path = path.resolve()
    status = path.stat()
    key = [kind, str(path), status.st_size, status.st_mtime_ns]
    slot = cache_home() / "digests" / f"{hashlib.sha256(f'{kind}:{path}'.encode()).hexdigest()[:32]}.json"
    try:
        stored = json.loads(slot.read_bytes())
        if stored["key"] == key and all(isinstance(v, str) for v in stored["value"]):
            return list(stored["value"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    value = compute(path)
    store(slot, {"key": key, "value": value})
    return value


def store(slot: Path, entry: Mapping[str, object]) -> None:
    """Write `entry` as JSON, all or nothing; where that cannot be done, nothing."""
    try:
        slot.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=slot.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump(entry, file)
        Path(name).replace(slot)
    except OSError:
        pass


def _digest(path: Path) -> list[str]:
    state = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return [state.hexdigest()]
