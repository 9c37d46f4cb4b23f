"""The header of a GGUF file, walked before any library reads the file: whatever it says lies within the file.

The libraries trust counts and lengths, and would loop or reserve memory for what is not there. What is accepted here
costs them memory in proportion to the file, and no more layers than the file has tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from gguf.constants import GGML_QUANT_SIZES

from shared.errors import ModelError

VERSIONS = (2, 3)
MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_NAME = 1 << 16
"""Bytes of a name or a key."""
MAX_ELEMENTS = 1 << 22
"""Of all arrays: the readers spend some hundred bytes on each. A vocabulary of 256k tokens takes a third of that."""
MAX_DIMENSIONS = 4
MAX_COUNT = 1 << 20
"""Of layers, heads, experts: more than any model has, and little enough to make one module of a model for each."""
MAX_NUMBER = 1 << 31
"""Sizes of a model are below that."""
_PREFIX = struct.Struct("<4sIQQ")
_U32, _U64, _PLACE = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_BLOCKS = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


def check(path: Path) -> None:
    """Raises ModelError, saying what is wrong, for a file that is not sound; OSError when it cannot be read."""
    with path.open("rb") as file:
        if path.stat().st_size < _PREFIX.size:
            _refuse(path, "too short for a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                _check(data)
            except (ValueError, struct.error) as error:
                _refuse(path, str(error) if type(error) is ValueError else "it is cut off, or a text is not UTF-8")


def _refuse(path: Path, why: str) -> NoReturn:
    raise ModelError(f"{path.name} cannot be converted: {why}")


class _Walk:
    """A place in the file that only goes forward. Errors: ValueError, struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.at = 0
        self._data = data
        self._elements = 0

    def take(self, what: struct.Struct) -> Any:
        found = what.unpack_from(self._data, self.at)
        self.at += what.size
        return found if len(found) > 1 else found[0]

    def skip(self, count: int) -> int:
        """Returns where it was."""
        start, self.at = self.at, self.at + count
        if self.at > len(self._data):
            raise ValueError("it says that it is longer than it is")
        return start

    def text(self) -> str:
        start = self.skip(self.take(_U64))
        return self._data[start : self.at].decode("utf-8")

    def name(self) -> str:
        (size,) = _U64.unpack_from(self._data, self.at)
        if size > MAX_NAME:
            raise ValueError(f"a name of {size} bytes")
        return self.text()

    def value(self, kind: int) -> Any:
        """A number or a text; of an array, its kind of element."""
        if kind in _SCALARS:
            return self.take(struct.Struct(_SCALARS[kind]))
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"a value of type {kind}, which is not known")
        element, count = self.take(_PLACE)
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise ValueError(f"arrays of more than {MAX_ELEMENTS} elements")
        if element in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[element]))
        elif element == _STRING:
            for _ in range(count):
                self.skip(self.take(_U64))
        else:
            raise ValueError(f"an array of type {element}, which is not known")
        return _ARRAY, element


def _check(data: mmap.mmap) -> None:
    walk = _Walk(data)
    magic, version, tensors, fields = walk.take(_PREFIX)
    if magic != b"GGUF" or version not in VERSIONS:
        raise ValueError(f"not a GGUF file of version {' or '.join(map(str, VERSIONS))}, little-endian")
    if fields > MAX_FIELDS or not 0 < tensors <= MAX_TENSORS:
        raise ValueError(f"it speaks of {tensors} tensors and {fields} fields")
    metadata: dict[str, Any] = {}
    kinds: dict[str, int] = {}
    for _ in range(fields):
        key, kind = walk.name(), walk.take(_U32)
        if key in metadata:
            raise ValueError(f"{key!r:.100} is said twice")
        metadata[key], kinds[key] = walk.value(kind), kind
    _check_model(metadata, tensors)
    alignment = metadata.get("general.alignment", 32)
    if kinds.get("general.alignment", _UINT32) != _UINT32 or not alignment or alignment & (alignment - 1):
        raise ValueError("general.alignment is no power of two")
    _check_tensors(walk, tensors, alignment, len(data))


def _check_model(metadata: Mapping[str, Any], tensors: int) -> None:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ValueError("general.architecture is missing")
    counts = {"block_count": 0, "expert_count": 1}
    for key, value in metadata.items():
        if not key.startswith(f"{architecture}."):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key:.100} is {value}")
        most = MAX_COUNT if key.endswith("_count") else MAX_NUMBER
        if type(value) is int and not 0 <= value < most:
            raise ValueError(f"{key:.100} is {value}")
        suffix = key.removeprefix(f"{architecture}.")
        if suffix in counts and type(value) is int:
            counts[suffix] = max(1, value)
    if counts["block_count"] > tensors or counts["block_count"] * counts["expert_count"] >= MAX_COUNT:
        raise ValueError(f"{counts['block_count']} layers of {counts['expert_count']} experts in {tensors} tensors")


def _check_tensors(walk: _Walk, count: int, alignment: int, size: int) -> None:
    names: set[str] = set()
    places: list[tuple[int, int]] = []
    for _ in range(count):
        name = walk.name()
        if name in names:
            raise ValueError(f"tensor {name!r:.100} is there twice")
        names.add(name)
        places.append(_place(walk, name))
    start = -(-walk.at // alignment) * alignment
    last = 0
    for offset, length in sorted(places):
        if offset < last or start + offset + length > size:
            raise ValueError("its tensors overlap, or reach beyond its end")
        last = offset + length


def _place(walk: _Walk, name: str) -> tuple[int, int]:
    """Where a tensor's bytes begin, and how many they are."""
    dimensions = walk.take(_U32)
    if not 0 < dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r:.100} has {dimensions} dimensions")
    shape = [walk.take(_U64) for _ in range(dimensions)]
    kind, offset = walk.take(_PLACE)
    elements, size = _BLOCKS.get(kind, (0, 0))
    if not elements or not all(shape) or max(shape) >= 1 << 48 or shape[0] % elements:
        raise ValueError(f"tensor {name!r:.100} has a shape or a type that is not known")
    return offset, math.prod(shape) // elements * size
