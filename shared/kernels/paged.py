"""The sink of an engine step on a GPU: as `shared.engine.attention.Paged`, in Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.attention import Features
from shared.engine.pool import KVPool
from shared.kernels.attention import attention, tiling_for
from shared.kernels.layer import seals
from shared.kernels.meta import StepMeta
from shared.kernels.seal import keep, seal
from shared.kernels.write import write


class TritonPaged:
    """Writes the new tokens' KV into the pool, then attends over block tables; tokens in the order of `meta`."""

    def __init__(self, pool: KVPool, meta: StepMeta) -> None:
        self._pool, self._meta = pool, meta
        self._kept: list[tuple[int, Tensor]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, features: Features) -> Tensor:
        """See `shared.engine.attention.Sink`. Rows of padding come out as zeros."""
        kv, meta = self._pool.layers[layer], self._meta
        query, key, value = (_by_token(tensor) for tensor in (query, key, value))
        tokens, heads, _ = query.shape
        tiling = tiling_for(kv, meta, heads, query.itemsize, hip=torch.version.hip is not None)
        # What attention leaves alone is padding; zeros there cannot turn into NaN on their way through the model.
        empty = query.new_zeros if tiling.splits == 1 else query.new_empty
        out = empty(tokens, heads, kv.shape.v_dim)
        write(kv, meta, key, value).run()
        if seals(kv):
            seal(kv, meta, key).run()
            self._kept.append((layer, key))
        for call in attention(kv, meta, query, key, features, tiling, out):
            call.run()
        return out

    def keep(self) -> None:
        """The step has succeeded: its raw keys replace older ones. Not before, so that a failed one can be repeated."""
        for layer, key in self._kept:
            keep(self._pool.layers[layer], self._meta, key).run()


def _by_token(tensor: Tensor) -> Tensor:
    """[heads, tokens, dim] → [tokens, heads, dim], each vector contiguous."""
    by_token = tensor.transpose(0, 1)
    return by_token if by_token.stride(2) == 1 else by_token.contiguous()
