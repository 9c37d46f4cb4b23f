"""Keys with a step and a minimum per channel over the block: quantised when the block is full, kept raw until then."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shared.engine.pool import LayerKV
from shared.kernels.call import Call, power_of_two
from shared.kernels.layer import columns, fields
from shared.kernels.load import channels_of, raw_keys
from shared.kernels.meta import StepMeta
from shared.kernels.quantise import (
    EXACT,
    TINY,
    divided,
    from_small_float,
    has_nan,
    nearest,
    to_small_float,
    within_fp16,
)

_NUMBERS = 2048
"""Of keys that a program keeps: 16 for each of its 128 threads."""


@triton.jit
def _seal(  # type: ignore[no-untyped-def]
    new_keys, tail, K, KS, KM, KU, tables, query_starts, starts, slots, max_blocks, ring, key_token, key_head,
    K_BLOCK: tl.constexpr, KS_BLOCK: tl.constexpr, KM_BLOCK: tl.constexpr, KU_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, K_DIM: tl.constexpr, ROWS: tl.constexpr,
    K_COLUMNS: tl.constexpr, K_HALF: tl.constexpr,
):  # fmt: skip
    """Program (sequence, n, KV head): the n-th block that the step can fill, if it does."""
    sequence, head = tl.program_id(0), tl.program_id(2)
    begin = tl.load(query_starts + sequence)
    start = tl.load(starts + sequence)
    number = start // BLOCK_SIZE + tl.program_id(1)
    first = number * BLOCK_SIZE
    if first + BLOCK_SIZE > start + tl.load(query_starts + sequence + 1) - begin:
        return
    row = tl.arange(0, ROWS)
    seen = row < BLOCK_SIZE
    slot = tl.load(slots + sequence)
    x = raw_keys(
        new_keys, tail, first + row, seen, start, begin, slot, ring, key_token, key_head, head, KV_HEADS, K_DIM,
        K_COLUMNS, K_HALF,
    ).to(tl.float32)  # fmt: skip
    x = within_fp16(x)
    low = tl.min(tl.where(seen[:, None], x, float("inf")), axis=0)
    high = tl.max(tl.where(seen[:, None], x, -float("inf")), axis=0)
    low = tl.where(has_nan(x, 0), float("nan"), low)
    wanted = divided(high - low, tl.full((1,), 15.0, tl.float32))
    unit = tl.maximum(divided(tl.max(wanted, axis=0, keep_dims=True), tl.full((1,), 1.9375, tl.float32)), TINY)
    unit = tl.where(tl.max((wanted != wanted).to(tl.int32), axis=0, keep_dims=True) > 0, float("nan"), unit)
    codes = to_small_float(divided(wanted, unit), 4)
    step = unit * from_small_float(codes, 4)
    # What nearest rounding of the step leaves over or cuts off is shared by both ends.
    minimum = within_fp16((low + high) * 0.5 - step * 7.5).to(tl.float16)
    quantised = nearest(divided(x - minimum.to(tl.float32)[None, :], tl.maximum(step, TINY)[None, :]), 0.0, 15.0)

    block = tl.load(tables + sequence.to(tl.int64) * max_blocks + number).to(tl.int64)
    halves = tl.permute(tl.reshape(quantised.to(tl.uint8), (ROWS, 2, K_COLUMNS // 2)), (0, 2, 1))
    lower, upper = tl.split(halves)
    place = tl.arange(0, K_COLUMNS // 2)
    at = K + block * K_BLOCK + ((row * KV_HEADS + head) * K_HALF)[:, None] + place[None, :]
    tl.store(at, lower | (upper << 4), mask=seen[:, None] & (place < K_HALF)[None, :])
    channel, valid = channels_of(K_COLUMNS, K_HALF, K_DIM)
    tl.store(KM + block * KM_BLOCK + head * K_DIM + channel, minimum, mask=valid)
    tl.store(KS + block * KS_BLOCK + head * K_DIM + channel, codes, mask=valid)
    tl.store(KU + block * KU_BLOCK + head + tl.arange(0, 1), unit)


@triton.jit
def _keep(  # type: ignore[no-untyped-def]
    key, tail, keep_at, tokens, key_token, key_head, KV_HEADS: tl.constexpr, K_DIM: tl.constexpr, ROWS: tl.constexpr,
    K_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program's rows are (token, head) pairs."""
    row, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, K_COLUMNS)
    token, head = row // KV_HEADS, row % KV_HEADS
    to = tl.load(keep_at + token, mask=token < tokens, other=-1).to(tl.int64)
    inside = (to >= 0)[:, None] & (channel < K_DIM)[None, :]  # others are padding, or not needed any more
    source = key + token.to(tl.int64) * key_token + head * key_head
    x = tl.load(source[:, None] + channel[None, :], mask=inside)
    tl.store(tail + ((to * KV_HEADS + head) * K_DIM)[:, None] + channel[None, :], x, mask=inside)


def seal(kv: LayerKV, meta: StepMeta, key: Tensor) -> Call:
    """The launch that quantises the keys of blocks that the step fills. key [tokens, kv_heads, k_dim], raw."""
    shape, capacity, size = kv.shape, meta.capacity, meta.block_size
    pointers, constants = fields(kv)
    names = ("K", "KS", "KM", "KU")
    k_columns, k_half = columns(shape.k_dim, True)
    return Call(
        _seal,
        # A span that begins at the end of a block may fill one more than its length alone would.
        (capacity.sequences, (capacity.queries + size - 1) // size, shape.kv_heads),
        {
            "new_keys": key, "key_token": key.stride(0), "key_head": key.stride(1), "tail": kv.tail, "ring": meta.ring,
            "tables": meta.tables, "max_blocks": capacity.blocks, "query_starts": meta.query_starts,
            "starts": meta.starts, "slots": meta.slots,
        } | {name: pointers[name] for name in names},
        {
            "BLOCK_SIZE": size, "KV_HEADS": shape.kv_heads, "K_DIM": shape.k_dim, "ROWS": power_of_two(size),
            "K_COLUMNS": k_columns, "K_HALF": k_half,
        } | {f"{name}_BLOCK": constants[f"{name}_BLOCK"] for name in names},
        options=EXACT,
    )  # fmt: skip


def keep(kv: LayerKV, meta: StepMeta, key: Tensor) -> Call:
    """The launch that puts raw keys [tokens, kv_heads, k_dim], which later steps may need, into the layer's tail."""
    shape, tokens, k_columns = kv.shape, key.shape[0], power_of_two(kv.shape.k_dim)
    rows = max(1, _NUMBERS // k_columns)
    return Call(
        _keep,
        (-(-tokens * shape.kv_heads // rows),),
        {
            "key": key, "tail": kv.tail, "keep_at": meta.keep_at, "tokens": tokens, "key_token": key.stride(0),
            "key_head": key.stride(1),
        },
        {"KV_HEADS": shape.kv_heads, "K_DIM": shape.k_dim, "ROWS": rows, "K_COLUMNS": k_columns},
    )  # fmt: skip
