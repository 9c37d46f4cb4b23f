"""What a model is, as a digest that two processes can compare. No torch, and no trace of library versions."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from shared.cache.naming import LAYOUT_VERSION
from shared.engine.digests import cached
from shared.errors import ModelError
from shared.vocabulary import pairs

_MAX_HEADER = 100 << 20
_CHUNK = 1 << 22

# Of config.json: what says which library wrote it or how the file is stored, but not what the model computes.
_NOT_THE_MODEL = frozenset({"transformers_version", "use_cache", "dtype", "torch_dtype"})


def fingerprint(folder: Path, *, dtype: str = "float32", layers: int | None = None) -> str:
    """SHA-256 over the configuration (rope included), every tensor, the dtype computed in and the KV layout's version.

    `layers` is how many decoder layers are run when not all are. The same tensors give the same fingerprint however
    they are spread over files. Hashing runs at about 1 GB/s the first time; later calls only look at file times.
    """
    state = hashlib.sha256(b"trine-fingerprint\0")
    config = {
        k: v for k, v in read_json(folder / "config.json").items() if k not in _NOT_THE_MODEL and not k.startswith("_")
    }
    parts = [f"{LAYOUT_VERSION} {dtype} {layers or 'all'}", json.dumps(config, sort_keys=True)]
    tensors = [line for path in weight_files(folder) for line in cached("tensors", path, tensor_digests)]
    for part in parts + sorted(tensors):
        field = part.encode()
        state.update(struct.pack("<Q", len(field)) + field)
    return state.hexdigest()


def vocabulary_digest(folder: Path) -> str:
    """SHA-256 over which token has which id: two models with the same digest can exchange token ids."""
    return cached("vocabulary", folder / "tokenizer.json", _vocabulary)[0]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelError when there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no *.safetensors file")
    return files


def tensor_digests(path: Path) -> list[str]:
    """Name, dtype, shape and SHA-256 of each tensor in a safetensors file."""
    with path.open("rb") as file:
        size = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0]
        if not 0 < size <= min(_MAX_HEADER, path.stat().st_size):
            raise ModelError(f"{path} is not a safetensors file")
        try:
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            entries = sorted(
                ((n, t["dtype"], t["shape"], *_offsets(t["data_offsets"])) for n, t in header.items()),
                key=lambda entry: entry[3],
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{path} has an unreadable safetensors header: {error!s:.500}") from None
        lines, last = [], 0
        for name, dtype, shape, start, end in entries:
            if start < last:  # else a short file could have its bytes hashed over and over
                raise ModelError(f"{path}: tensors overlap", field=name[:100])
            last = end
            file.seek(8 + size + start)
            lines.append(f"{name} {dtype} {shape} {_digest_of(file, end - start, path)}")
        return lines


def _offsets(found: Any) -> tuple[int, int]:
    """Raises ValueError or TypeError for what are none."""
    start, end = found
    if type(start) is not int or type(end) is not int or not 0 <= start <= end < 1 << 63:
        raise ValueError(f"{found!r:.100} are no offsets")
    return start, end


def _digest_of(file: Any, length: int, path: Path) -> str:
    state = hashlib.sha256()
    while length > 0:
        chunk = file.read(min(length, _CHUNK))
        if not chunk:
            raise ModelError(f"{path} is shorter than its header says")
        state.update(chunk)
        length -= len(chunk)
    return state.hexdigest()


def _vocabulary(path: Path) -> list[str]:
    try:
        found = pairs(json.loads(path.read_bytes()))
        lines = sorted({f"{index} {json.dumps(token)}" for index, token in found})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error!s:.500}") from None
    return [hashlib.sha256("\n".join(lines).encode()).hexdigest()]
