"""Attention over paged KV, as transformers calls it.

A model is loaded with `attn_implementation=NAME`; each of its attention layers then calls `_dispatch`, which hands
the call to the sink set for the current forward pass (a `Paged` step, or the probe at load). A context variable
carries the sink because some architectures drop keyword arguments on the way.
"""

from __future__ import annotations

import math
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
from shared.engine.codecs.base import PerBlock, PerToken
from shared.engine.pool import KVPool, LayerKV

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


def sink() -> Sink:
    """The one in force."""
    return _sink.get()


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
    return sink().attend(module.layer_idx, query[0], key[0], value[0], features)[None], None


AttentionInterface.register(NAME, _dispatch)


class Paged:
    """The sink of an engine step: writes the new tokens' KV into the pool, then attends over block tables."""

    def __init__(self, pool: KVPool, batch: Batch) -> None:
        self._pool, self._batch = pool, batch
        self._kept: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, features: Features) -> Tensor:
        kv, batch = self._pool.layers[layer], self._batch
        key, query = key.transpose(0, 1), query.transpose(0, 1)
        kv.codec.write_values(kv.views, batch.blocks, batch.offsets, value.transpose(0, 1))
        raw = self._write_keys(kv, key)
        if len(batch.groups) == 1:
            return _attend_group(batch.groups[0], query, kv, raw, features)
        return torch.cat([_attend_group(g, query[g.tokens], kv, raw, features) for g in batch.groups])

    def _write_keys(self, kv: LayerKV, key: Tensor) -> Tensor | None:
        """key [tokens, kv_heads, k_dim]. The step's raw keys, if the codec seals."""
        batch, codec = self._batch, kv.codec
        if isinstance(codec, PerToken):
            codec.write_keys(kv.views, batch.blocks, batch.offsets, key)
        if batch.raw is None or not isinstance(codec, PerBlock):
            return None
        raw = torch.cat([kv.tail.index_select(0, batch.raw.lead), key])
        if len(batch.raw.seal_blocks):
            full = raw.index_select(0, batch.raw.seal_rows).view(-1, self._pool.block_size, *raw.shape[1:])
            codec.seal_keys(kv.views, batch.raw.seal_blocks, full)
        self._kept.append((kv.tail, raw.index_select(0, batch.raw.keep_rows)))
        return raw

    def keep(self) -> None:
        """The step has succeeded: its raw keys replace older ones. Not before, so that a failed one can be repeated."""
        if self._batch.raw is not None:
            for tail, kept in self._kept:
                tail.index_copy_(0, self._batch.raw.keep_at, kept)


def _attend_group(group: Group, query: Tensor, kv: LayerKV, raw: Tensor | None, features: Features) -> Tensor:
    """query [tokens, heads, k_dim] → [tokens, heads, v_dim]. `raw`: keys that are not sealed, if the codec seals."""
    if group.pick is not None:
        query = query.index_select(0, group.pick)
    kv_heads, share, block_size = kv.shape.kv_heads, query.shape[1] // kv.shape.kv_heads, kv.views["values"].shape[1]
    gather = group.gather(features.window, share, block_size, query.dtype)
    # Query heads of one KV head become rows of one matrix: keys and values are read once for all of them.
    query = query.reshape(group.sequences, group.width, kv_heads, share, -1).permute(0, 2, 3, 1, 4)

    def rows(gathered: Tensor) -> Tensor:
        """[sequences, kv_heads, positions, dim], of as many positions per sequence; there may be none."""
        each = math.prod(gathered.shape[:-2]) // group.sequences
        return gathered.reshape(group.sequences, each, *gathered.shape[-2:]).transpose(1, 2)

    keys = rows(kv.codec.read_keys(kv.views, gather.blocks, kv.shape, query.dtype))
    values = rows(kv.codec.read_values(kv.views, gather.blocks, kv.shape, query.dtype))
    raw_keys = raw_values = None
    if raw is not None and gather.raw_rows is not None and gather.raw_blocks is not None:
        raw_keys = rows(raw.index_select(0, gather.raw_rows))
        raw_values = rows(kv.codec.read_values(kv.views, gather.raw_blocks, kv.shape, query.dtype))
    outs = []
    for tile in gather.tiles:
        k, v = _seen(keys, raw_keys, tile), _seen(values, raw_values, tile)
        out = attend(query[:, :, :, tile.first : tile.last].flatten(2, 3), k, v, tile, features, share)
        outs.append(out.view(*out.shape[:2], share, tile.last - tile.first, -1))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=3)
    out = out.permute(0, 3, 1, 2, 4).reshape(group.sequences * group.width, kv_heads * share, -1)
    return out if group.unpick is None else out.index_select(0, group.unpick)


def _seen(gathered: Tensor, raw: Tensor | None, tile: Tile) -> Tensor:
    """[sequences, kv_heads, keys, dim]: the sealed ones, then the raw ones."""
    sealed = gathered[:, :, tile.low : tile.high]
    return sealed if raw is None or tile.raw is None else torch.cat([sealed, raw[:, :, tile.raw]], dim=2)


def attend(query: Tensor, key: Tensor, value: Tensor, tile: Tile, features: Features, share: int) -> Tensor:
    """query [B, kv_heads, share * n, k_dim], key [B, kv_heads, L, k_dim], value [B, kv_heads, L, v_dim] → as query."""
    if features.softcap is None and features.sinks is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=tile.mask, scale=features.scale)
    scores = (query * features.scale) @ key.transpose(-1, -2)
    if features.softcap is not None:
        scores = torch.tanh(scores / features.softcap) * features.softcap
    if tile.mask is not None:
        scores = scores + tile.mask
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if features.sinks is None:
        return scores.softmax(-1).to(value.dtype) @ value
    sinks = features.sinks.to(scores.dtype).view(1, -1, share, 1).repeat_interleave(query.shape[2] // share, 2)
    weights = torch.cat([scores, sinks.expand(scores.shape[0], -1, -1, 1)], -1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value
