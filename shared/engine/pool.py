"""The paged KV pool: all layers of a block lie side by side, so that a block travels as one run of bytes."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shared.engine.codecs.base import Codec, Field, LayerShape, PerBlock, Views
from shared.errors import ConfigError, FrameError

_ALIGN = 16
_PLENTY = 8
"""A pool is taken whole where so many of them could be had: a computer has several workers, and others' work."""
_SLICE = 64 << 20
_MADV_POPULATE_WRITE = 23
"""Of Linux (madvise(2)); Python's `mmap` does not name it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where one field of one layer lies inside a block. `offset` in bytes, a multiple of 16."""

    offset: int
    field: Field


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The bytes of a block: layer after layer, each the codec's fields in their order."""

    layers: tuple[tuple[Part, ...], ...]
    block_bytes: int

    @classmethod
    def of(cls, shapes: Sequence[LayerShape], block_size: int, dtype: torch.dtype, codec: Codec) -> BlockLayout:
        layers: list[tuple[Part, ...]] = []
        end = 0
        for shape in shapes:
            parts = []
            for field in codec.fields(shape, block_size, dtype):
                parts.append(Part(end, field))
                size = math.prod(field.shape) * field.dtype.itemsize
                end += -(-size // _ALIGN) * _ALIGN
            layers.append(tuple(parts))
        return cls(tuple(layers), end)


@dataclass(frozen=True, slots=True)
class Tails:
    """Room for keys that are not sealed yet, of codecs that seal whole blocks.

    Position p of the sequence in slot s is kept in row `s * ring + p % ring`.
    """

    slots: int
    ring: int

    @classmethod
    def of(cls, codec: Codec, slots: int, lookahead: int, block_size: int) -> Tails:
        """`lookahead`: how many positions a sequence may have to go back, because it guessed them."""
        return cls(slots, lookahead + block_size) if isinstance(codec, PerBlock) else cls(0, 0)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's share of the pool. `tail` [slots * ring, kv_heads, k_dim], in the model's dtype."""

    codec: Codec
    shape: LayerShape
    views: Views
    tail: Tensor


class KVPool:
    """`blocks` blocks of KV in one storage, all zero at first.

    On the CPU a pool that is small beside the memory at hand is taken whole. Of a larger one the system gives zeroed
    pages on first touch: what is not used costs nothing.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        codec: Codec,
        tails: Tails = Tails(0, 0),  # immutable
    ) -> None:
        layout = BlockLayout.of(shapes, block_size, dtype, codec)
        self.blocks, self.block_size, self.block_bytes = blocks, block_size, layout.block_bytes
        self.tails = tails
        self._storage = _zeroed(blocks * layout.block_bytes, device).view(blocks, layout.block_bytes)
        rows = tails.slots * tails.ring
        self.layers = [
            LayerKV(
                codec,
                shape,
                {part.field.name: self._view(part) for part in parts},
                torch.zeros(rows, shape.kv_heads, shape.k_dim, dtype=dtype, device=device),
            )
            for shape, parts in zip(shapes, layout.layers, strict=True)
        ]

    def _view(self, part: Part) -> Tensor:
        """[blocks, *field.shape]; a field is contiguous inside a block."""
        numbers = self._storage.view(-1).view(part.field.dtype)
        inner = [math.prod(part.field.shape[i + 1 :]) for i in range(len(part.field.shape))]
        item = part.field.dtype.itemsize
        return numbers.as_strided(
            (self.blocks, *part.field.shape), (self.block_bytes // item, *inner), part.offset // item
        )

    def block(self, index: int) -> memoryview:
        """The block's bytes, read-only. On the CPU without a copy: they change when the block is written."""
        return self._row(index).cpu().numpy().data.toreadonly()

    def landing(self, index: int) -> memoryview | None:
        """The block's bytes, writable, without a copy; None for a pool on a GPU."""
        row = self._row(index)
        return row.numpy().data.cast("B") if row.is_cpu else None

    def write(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Raises FrameError unless `data` has exactly `block_bytes` bytes."""
        row, view = self._row(index), memoryview(data)
        if view.nbytes != self.block_bytes or not view.contiguous:
            raise FrameError(f"a block of {view.nbytes} bytes; this model's have {self.block_bytes}")
        if row.is_cpu:
            row.numpy().data[:] = view.cast("B")
        else:
            row.copy_(torch.frombuffer(bytearray(view), dtype=torch.uint8))

    def clear(self, index: int) -> None:
        """Zero a block. Whoever begins one must, unless it writes all of it: attention multiplies what lies behind
        the last token by zero, and a NaN left there by an earlier owner would survive that."""
        self._row(index).zero_()

    def _row(self, index: int) -> Tensor:
        if not 0 <= index < self.blocks:
            raise FrameError(f"block {index} of a pool of {self.blocks}")
        return self._storage[index]


def _zeroed(size: int, device: torch.device) -> Tensor:
    try:
        if device.type == "cpu":
            return torch.frombuffer(_pages(size), dtype=torch.uint8)
        return torch.zeros(size, dtype=torch.uint8, device=device)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"no room for a KV pool of {size >> 20} MiB: {error}", field="kv_blocks") from None


def _pages(size: int) -> mmap.mmap:
    """Had from the system at once where it has plenty: on a virtual machine that gets its memory by use, the first
    touch of a page was measured to cost 20 µs in the midst of steps, and 3 µs here."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size <= _available() // _PLENTY:
        with suppress(OSError):  # Linux before 5.14 cannot, nor can other systems
            for start in range(0, size, _SLICE):  # Python lets no other thread run meanwhile
                pages.madvise(_MADV_POPULATE_WRITE, start, min(_SLICE, size - start))
    return pages


def _available(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that could be had without taking them from others, by the system and by the limit of a container; 0 where
    the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, KeyError, IndexError):
        return 0
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # ValueError: "max", no limit
        return available
    return max(0, min(available, limit - used))
