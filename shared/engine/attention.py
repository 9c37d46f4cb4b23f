"""Attention over paged KV, as transformers calls it.

A model is loaded with `attn_implementation=NAME`; each of its attention layers then calls `_dispatch`, which hands
the call to the sink set for the current forward pass (a `Paged` step, or the probe at load). A context variable
carries the sink because some architectures drop keyword arguments on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from shared.engine.batch import Batch, Group, Tile
from shared.engine.pool import KVPool

NAME = "trine_paged"


@dataclass(frozen=True, slots=True)
class Features:
    """What a layer asks for beyond plain causal attention."""

    scale: float
    window: int | None = None
    """A query sees that many positions, its own included."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""
    sinks: Tensor | None = None
    """[heads]: a score per head that takes part in the softmax and has no value."""


class Sink(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, features: Features) -> Tensor:
        """query [heads, T, k_dim], key [kv_heads, T, k_dim], value [kv_heads, T, v_dim] → [T, heads, v_dim]."""
        ...


_sink: ContextVar[Sink] = ContextVar("attention_sink")


@contextmanager
def attending(sink: Sink) -> Iterator[None]:
    """Within, attention layers of models loaded under NAME call `sink`."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)


def _dispatch(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    features = Features(scale, sliding_window or None, softcap or None, s_aux)
    return _sink.get().attend(module.layer_idx, query[0], key[0], value[0], features)[None], None


AttentionInterface.register(NAME, _dispatch)


class Paged:
    """The sink of an engine step: writes the new tokens' KV into the pool, then attends over block tables."""

    def __init__(self, pool: KVPool, batch: Batch) -> None:
        self._pool, self._batch = pool, batch

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, features: Features) -> Tensor:
        keys, values, batch = self._pool.keys[layer], self._pool.values[layer], self._batch
        where = (batch.blocks, batch.offsets)
        keys.index_put_(where, key.transpose(0, 1))
        values.index_put_(where, value.transpose(0, 1))
        query = query.transpose(0, 1)
        if len(batch.groups) == 1:
            return _attend_group(batch.groups[0], query, keys, values, features)
        return torch.cat([_attend_group(g, query[g.tokens], keys, values, features) for g in batch.groups])


def _attend_group(group: Group, query: Tensor, keys: Tensor, values: Tensor, features: Features) -> Tensor:
    """query [tokens, heads, k_dim]; keys and values: the pool's of this layer → [tokens, heads, v_dim]."""
    if group.pick is not None:
        query = query.index_select(0, group.pick)
    kv_heads, share = keys.shape[2], query.shape[1] // keys.shape[2]
    gather = group.gather(features.window, share, keys.shape[1], query.dtype)
    # Query heads of one KV head become rows of one matrix: keys and values are read once for all of them.
    query = query.reshape(group.sequences, group.width, kv_heads, share, -1).permute(0, 2, 3, 1, 4)
    paged_k = keys.index_select(0, gather.blocks).view(group.sequences, -1, *keys.shape[2:]).transpose(1, 2)
    paged_v = values.index_select(0, gather.blocks).view(group.sequences, -1, *values.shape[2:]).transpose(1, 2)
    outs = []
    for tile in gather.tiles:
        rows = query[:, :, :, tile.first : tile.last]
        seen = slice(tile.low, tile.high)
        out = attend(rows.flatten(2, 3), paged_k[:, :, seen], paged_v[:, :, seen], tile, features, share)
        outs.append(out.view(*out.shape[:2], share, tile.last - tile.first, -1))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=3)
    out = out.permute(0, 3, 1, 2, 4).reshape(group.sequences * group.width, kv_heads * share, -1)
    return out if group.unpick is None else out.index_select(0, group.unpick)


def attend(query: Tensor, key: Tensor, value: Tensor, tile: Tile, features: Features, share: int) -> Tensor:
    """query [B, kv_heads, share * n, k_dim], key [B, kv_heads, L, k_dim], value [B, kv_heads, L, v_dim] → as query."""
    if features.softcap is None and features.sinks is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=tile.mask, scale=features.scale)
    scores = (query * features.scale) @ key.transpose(-1, -2)
    if features.softcap is not None:
        scores = torch.tanh(scores / features.softcap) * features.softcap
    if tile.mask is not None:
        scores = scores + tile.mask
    scores = scores.float()
    if features.sinks is None:
        return scores.softmax(-1).to(value.dtype) @ value
    sinks = features.sinks.float().view(1, -1, share, 1).repeat_interleave(query.shape[2] // share, 2)
    weights = torch.cat([scores, sinks.expand(scores.shape[0], -1, -1, 1)], -1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value
