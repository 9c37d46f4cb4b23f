"""Draft heads that come with Trine, a folder each, and how settings name a draft head. No torch."""

from __future__ import annotations

from pathlib import Path

from shared.engine.fingerprint import fingerprint, read_json
from shared.errors import ConfigError, ModelError

HOME = Path(__file__).parent
SHIPPED = "shipped"
"""In settings: the draft head that comes with Trine for the target."""


def find(name: str, target: Path) -> Path | None:
    """The folder of the draft head that `name` means, or None if it means a whole model.

    It is the path of such a folder, or `SHIPPED`, or "": the one that comes with Trine, if there is one for the model
    in the folder `target`, whose weights are read for that (fast from the second time on). Raises ConfigError,
    ModelError.
    """
    if name not in ("", SHIPPED):
        return Path(name).expanduser().resolve() if is_head(Path(name).expanduser()) else None
    found = shipped(target)
    if name and found is None:
        raise ConfigError(f"no draft head for {target.name} comes with Trine", field="drafter_model")
    return found


def needs_weights(name: str) -> bool:
    """Whether `name` means a whole model, whose weights have to be got first."""
    return name not in ("", SHIPPED) and not is_head(Path(name).expanduser())


def is_head(folder: Path) -> bool:
    """Whether the folder says that it is one. What cannot be read is none."""
    try:
        return read_json(folder / "config.json").get("kind") == "draft_head"
    except ModelError:
        return False


def shipped(target: Path) -> Path | None:
    """The one in `HOME` that was made for the weights in the folder `target`."""
    made_for = {_fingerprint(path.parent): path.parent for path in sorted(HOME.glob("*/config.json"))}
    return made_for.get(fingerprint(target)) if made_for else None


def _fingerprint(folder: Path) -> str:
    target = read_json(folder / "config.json").get("target")
    if not isinstance(target, dict) or not isinstance(found := target.get("fingerprint"), str):
        raise ModelError(f"{folder / 'config.json'}: target.fingerprint is missing", field="target.fingerprint")
    return found
