"""Files that are there whole or not at all, whenever the process is killed. No torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError


def put(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file or a folder that gets the name `path` when it is complete and on disk.

    What had that name before is replaced. One process at a time may write `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    _remove(part)
    write(part)
    for file in [part] if part.is_file() else part.rglob("*"):
        _sync(file)
    if path.is_dir():
        _remove(path)  # a folder cannot be replaced in one step; a kill in between costs what was there
    part.replace(path)
    _sync(path.parent)


def put_json(path: Path, value: object) -> None:
    """`value` (a dataclass is fine), indented, with sorted keys."""
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    text = json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    put(path, lambda part: part.write_text(text, encoding="utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError when there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def agree(path: Path, settings: Any) -> None:
    """Settings that made what lies next to `path` must stay the same; they are noted there at the first time.

    Raises ConfigError, naming the setting that differs.
    """
    if not path.exists():
        put_json(path, settings)
        return
    before, now = read_object(path), json.loads(json.dumps(asdict(settings)))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise ConfigError(
                f"{path.parent} was made with {name} = {before.get(name)!r}, not {now.get(name)!r}: "
                "give the same settings or another folder",
                field=name,
            )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
