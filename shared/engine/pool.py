"""The paged KV pool: all layers of a block lie side by side, so that a block travels as one run of bytes."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import ConfigError, FrameError

_ALIGN = 16


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per token: `kv_heads` keys of `k_dim` and values of `v_dim` numbers."""

    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class Part:
    """Where one layer's keys or values lie inside a block. `offset` in bytes, a multiple of 16."""

    offset: int
    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The bytes of a block: per layer [block_size, kv_heads, dim] keys, then values, in the model's dtype."""

    keys: tuple[Part, ...]
    values: tuple[Part, ...]
    block_bytes: int

    @classmethod
    def of(cls, shapes: Sequence[LayerShape], block_size: int, itemsize: int) -> BlockLayout:
        keys: list[Part] = []
        values: list[Part] = []
        end = 0
        for shape in shapes:
            for parts, dim in ((keys, shape.k_dim), (values, shape.v_dim)):
                parts.append(Part(end, shape.kv_heads, dim))
                size = block_size * shape.kv_heads * dim * itemsize
                end += -(-size // _ALIGN) * _ALIGN
        return cls(tuple(keys), tuple(values), end)


class KVPool:
    """`blocks` blocks of KV in one storage, all zero at first.

    `keys[layer]` and `values[layer]` are strided views [blocks, block_size, kv_heads, dim] into it. On the CPU the
    system gives zeroed pages on first touch, so an unused pool costs no memory.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layout = BlockLayout.of(shapes, block_size, dtype.itemsize)
        self.blocks, self.block_size, self.block_bytes = blocks, block_size, layout.block_bytes
        self._storage = _zeroed(blocks * layout.block_bytes, device).view(blocks, layout.block_bytes)
        numbers = self._storage.view(-1).view(dtype)
        self.keys = [self._view(numbers, part) for part in layout.keys]
        self.values = [self._view(numbers, part) for part in layout.values]

    def _view(self, numbers: Tensor, part: Part) -> Tensor:
        item = numbers.element_size()
        size = (self.blocks, self.block_size, part.heads, part.dim)
        stride = (self.block_bytes // item, part.heads * part.dim, part.dim, 1)
        return numbers.as_strided(size, stride, part.offset // item)

    def block(self, index: int) -> memoryview:
        """The block's bytes, read-only. On the CPU without a copy: they change when the block is written."""
        return self._row(index).cpu().numpy().data.toreadonly()

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
            return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        return torch.zeros(size, dtype=torch.uint8, device=device)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"no room for a KV pool of {size >> 20} MiB: {error}", field="kv_blocks") from None
