"""Keys and values as they are, in the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.codecs.base import Field, LayerShape, PerToken, Views


class Raw(PerToken):
    name = "none"

    def fields(self, shape: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (
            Field("keys", dtype, (block_size, shape.kv_heads, shape.k_dim)),
            Field("values", dtype, (block_size, shape.kv_heads, shape.v_dim)),
        )

    def write_keys(self, views: Views, blocks: Tensor, offsets: Tensor, keys: Tensor) -> None:
        views["keys"].index_put_((blocks, offsets), keys)

    def write_values(self, views: Views, blocks: Tensor, offsets: Tensor, values: Tensor) -> None:
        views["values"].index_put_((blocks, offsets), values)

    def read_keys(self, views: Views, blocks: Tensor, shape: LayerShape, dtype: torch.dtype) -> Tensor:
        return views["keys"].index_select(0, blocks)

    def read_values(self, views: Views, blocks: Tensor, shape: LayerShape, dtype: torch.dtype) -> Tensor:
        return views["values"].index_select(0, blocks)
