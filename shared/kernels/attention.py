"""The launches of paged attention for one layer of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared.engine.attention import Features
from shared.engine.pool import LayerKV
from shared.kernels.attention_kernels import attend, merge
from shared.kernels.call import Call, compute_type
from shared.kernels.layer import GROUP, columns, fields, seals
from shared.kernels.meta import StepMeta
from shared.kernels.tiling import Tiling, tiling


def tiling_for(kv: LayerKV, meta: StepMeta, heads: int, itemsize: int, hip: bool) -> Tiling:
    """`heads` query heads, in numbers of `itemsize` bytes."""
    packed = _packed(kv)
    return tiling(
        queries=meta.capacity.queries,
        context=meta.capacity.blocks * meta.block_size,
        share=heads // kv.shape.kv_heads,
        width=max(columns(kv.shape.k_dim, packed)[0], columns(kv.shape.v_dim, packed)[0]),
        itemsize=itemsize,
        quantised=kv.codec.name != "none",
        hip=hip,
    )


def attention(
    kv: LayerKV, meta: StepMeta, query: Tensor, key: Tensor, features: Features, tiling: Tiling, out: Tensor
) -> list[Call]:
    """The launches that attend `query` [tokens, heads, k_dim] over the layer's KV into `out` [tokens, heads, v_dim].
    Rows of padding become zeros if the context is split, and are left alone if not.

    The new tokens' KV has been written. `key` [tokens, kv_heads, k_dim]: the new keys, raw; read where keys are sealed.
    """
    shape, (tokens, heads, _) = kv.shape, query.shape
    pointers, constants = fields(kv)
    sealed = seals(kv)
    packed = _packed(kv)
    (k_columns, k_half), (v_columns, v_half) = columns(shape.k_dim, packed), columns(shape.v_dim, packed)
    queries = tiling.rows // (heads // shape.kv_heads)
    one_tile = meta.capacity.queries <= queries
    tiles = meta.capacity.sequences + (0 if one_tile else tokens // queries)
    parts: dict[str, Any] = {"part_sums": None, "part_logs": None}
    if tiling.splits > 1:
        parts["part_sums"] = query.new_empty((tokens, heads, tiling.splits, shape.v_dim), dtype=torch.float32)
        parts["part_logs"] = query.new_empty((tokens, heads, tiling.splits), dtype=torch.float32)
    raw = {"new_keys": key if sealed else None, "tail": kv.tail if sealed else None, "slots": meta.slots}
    given = {"out": out, "query": query, "sinks": features.sinks, **parts, **raw, **pointers}
    common = {"HEADS": heads, "V_DIM": shape.v_dim, "WINDOW": features.window or 0}
    attending = Call(
        attend,
        (tiles, shape.kv_heads, tiling.splits),
        {name: value for name, value in given.items() if value is not None}
        | {
            "tables": meta.tables, "query_starts": meta.query_starts, "starts": meta.starts,
            "scale": features.scale, "sequences": meta.capacity.sequences, "max_blocks": meta.capacity.blocks,
            "ring": max(meta.ring, 1), "splits": tiling.splits, "split_size": tiling.split_size,
            "query_token": query.stride(0), "query_head": query.stride(1),
            "key_token": key.stride(0), "key_head": key.stride(1),
        },
        {name: None for name, value in given.items() if value is None} | constants | common
        | {
            "CODEC": kv.codec.name, "SEALED": sealed, "BLOCK_SIZE": meta.block_size, "KV_HEADS": shape.kv_heads,
            "K_DIM": shape.k_dim, "K_COLUMNS": k_columns, "V_COLUMNS": v_columns, "K_HALF": k_half, "V_HALF": v_half,
            "V_RUN": _run(v_columns, v_half), "ROWS": tiling.rows, "KEYS": tiling.keys,
            "SOFTCAP": features.softcap or 0.0, "SPLIT": tiling.splits > 1, "ONE_TILE": one_tile,
            "COMPUTE": compute_type(query.dtype),
        },
        tiling.warps,
        tiling.stages,
    )  # fmt: skip
    if tiling.splits == 1:
        return [attending]
    sinks = {"sinks": features.sinks}
    merging = Call(
        merge,
        (tokens, heads),
        {"out": out, **parts, "positions": meta.positions, "token_blocks": meta.token_blocks}
        | (sinks if features.sinks is not None else {}),
        common
        | {"V_COLUMNS": columns(shape.v_dim, False)[0], "SPLITS": tiling.splits, "SPLIT_SIZE": tiling.split_size}
        | (sinks if features.sinks is None else {}),
    )
    return [attending, merging]


def _packed(kv: LayerKV) -> bool:
    return kv.codec.name == "int4"


def _run(v_columns: int, v_half: int) -> int:
    """How many neighbouring columns of packed values surely have the same group: the largest power of two that divides
    both a group and a half, and 1 or more of which fill the columns."""
    run = 1
    while run < GROUP and v_half % (run * 2) == 0 and v_columns // 2 % (run * 2) == 0:
        run *= 2
    return run
