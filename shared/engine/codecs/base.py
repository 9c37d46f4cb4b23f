"""What a KV codec is: how keys and values of one layer become the bytes of a block, and numbers again.

A codec whose scales belong to a token quantises when the token is written. One whose key scales belong to a block
(`PerBlock`) quantises when the block is full ("seals" it). Until then its keys exist only raw, in the tail of their
sequence; a query reads the keys of its own block raw and those of every earlier block as sealed, always, so that what
it sees does not depend on how the prompt was cut into steps, or on who computed the earlier blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Views = Mapping[str, Tensor]
"""Of one layer, by field name: [blocks, *field.shape], strided views into the pool."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per token: `kv_heads` keys of `k_dim` and values of `v_dim` numbers."""

    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class Field:
    """One array of one layer inside a block."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Codec(ABC):
    """Stateless. `blocks` and `offsets` (the place inside a block) are int64 [tokens] or [n]; no block is written twice
    in one call. All-zero bytes must read as finite numbers. Whatever is written, what is read is finite if that was."""

    name: str

    @abstractmethod
    def fields(self, shape: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Field, ...]:
        """The arrays of one layer; `dtype` is the model's."""

    @abstractmethod
    def write_values(self, views: Views, blocks: Tensor, offsets: Tensor, values: Tensor) -> None:
        """values [tokens, kv_heads, v_dim], each quantised by itself."""

    @abstractmethod
    def read_keys(self, views: Views, blocks: Tensor, shape: LayerShape, dtype: torch.dtype) -> Tensor:
        """[n, block_size, kv_heads, k_dim] in `dtype`."""

    @abstractmethod
    def read_values(self, views: Views, blocks: Tensor, shape: LayerShape, dtype: torch.dtype) -> Tensor:
        """[n, block_size, kv_heads, v_dim] in `dtype`."""


class PerToken(Codec):
    @abstractmethod
    def write_keys(self, views: Views, blocks: Tensor, offsets: Tensor, keys: Tensor) -> None:
        """keys [tokens, kv_heads, k_dim], each quantised by itself."""


class PerBlock(Codec):
    @abstractmethod
    def seal_keys(self, views: Views, blocks: Tensor, keys: Tensor) -> None:
        """keys [n, block_size, kv_heads, k_dim] of whole blocks."""
