"""Blocks of the pool as matrices of numbers, in kernels. Whatever is masked is not read, so it may hold anything."""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.layer import GROUP
from shared.kernels.quantise import from_small_float

_GROUP = tl.constexpr(GROUP)
FP8_FACTOR = tl.constexpr(256.0)


@triton.jit
def channels_of(COLUMNS: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """(channel, valid) of each column; see `layer.columns`."""
    column = tl.arange(0, COLUMNS)
    if HALF == 0 or 2 * HALF == COLUMNS:
        channel = column
        valid = column < DIM
    else:
        place = column % (COLUMNS // 2)
        channel = column // (COLUMNS // 2) * HALF + place
        valid = (place < HALF) & (channel < DIM)
    return channel, valid


@triton.jit
def blocks_of(table, positions, seen, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Block ids of `positions`, 64 bits wide: they are multiplied by the size of a block."""
    return tl.load(table + positions // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)


@triton.jit
def from_fp8(codes):  # type: ignore[no-untyped-def]
    """e4m3 bytes, divided by FP8_FACTOR, as fp16, exactly: the bits fit fp16, whose exponents count from 8 lower."""
    bits = codes.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def unpacked(pairs, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS, COLUMNS / 2] bytes → [ROWS, COLUMNS] codes 0 to 15: the low ones, then the high ones."""
    codes = tl.join(pairs & 15, pairs >> 4)
    return tl.reshape(tl.permute(codes, (0, 2, 1)), (ROWS, COLUMNS))


@triton.jit
def _spread(few, ROWS: tl.constexpr, RUNS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS, RUNS] → [ROWS, COLUMNS]: each number stands for a run of neighbouring columns."""
    return tl.reshape(tl.broadcast_to(few[:, :, None], (ROWS, RUNS, COLUMNS // RUNS)), (ROWS, COLUMNS))


@triton.jit
def load_keys(  # type: ignore[no-untyped-def]
    K, KS, KM, KU, table, first, seen, head,
    K_BLOCK: tl.constexpr, KS_BLOCK: tl.constexpr, KM_BLOCK: tl.constexpr, KU_BLOCK: tl.constexpr,
    CODEC: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, K_DIM: tl.constexpr,
    K_COLUMNS: tl.constexpr, K_HALF: tl.constexpr, KEYS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Keys [KEYS, K_COLUMNS] of positions `first`... where `seen`, and the factors [KEYS] their scores still need."""
    positions = first + tl.arange(0, KEYS)
    blocks = blocks_of(table, positions, seen, BLOCK_SIZE)
    rows = (positions % BLOCK_SIZE) * KV_HEADS + head
    factors = tl.full((KEYS,), 1.0, tl.float32)
    if CODEC == "int4":
        keys = _sealed_keys(
            K, KS, KM, KU, table, first, seen, head, blocks, rows, K_BLOCK, KS_BLOCK, KM_BLOCK, KU_BLOCK, BLOCK_SIZE,
            K_DIM, K_COLUMNS, K_HALF, KEYS,
        )  # fmt: skip
    else:
        channel, valid = channels_of(K_COLUMNS, 0, K_DIM)
        where = (blocks * K_BLOCK + rows * K_DIM)[:, None] + channel[None, :]
        keys = tl.load(K + where, mask=seen[:, None] & valid[None, :], other=0)
        if CODEC != "none":
            factors = tl.load(KS + blocks * KS_BLOCK + rows, mask=seen, other=0.0)
        if CODEC == "fp8_e4m3":
            keys = from_fp8(keys)
            factors *= FP8_FACTOR
    return keys.to(COMPUTE), factors


@triton.jit
def _sealed_keys(  # type: ignore[no-untyped-def]
    K, KS, KM, KU, table, first, seen, head, blocks, rows,
    K_BLOCK: tl.constexpr, KS_BLOCK: tl.constexpr, KM_BLOCK: tl.constexpr, KU_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_DIM: tl.constexpr, K_COLUMNS: tl.constexpr, K_HALF: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """`first` is a multiple of KEYS. fp32."""
    place = tl.arange(0, K_COLUMNS // 2)
    where = (blocks * K_BLOCK + rows * K_HALF)[:, None] + place[None, :]
    codes = unpacked(tl.load(K + where, mask=seen[:, None] & (place < K_HALF)[None, :], other=0), KEYS, K_COLUMNS)
    # Steps and minima belong to a block: they are read once for each, or for each key if blocks lie unevenly in tiles.
    EVEN: tl.constexpr = KEYS % BLOCK_SIZE == 0 or BLOCK_SIZE % KEYS == 0
    RUNS: tl.constexpr = max(KEYS // BLOCK_SIZE, 1) if EVEN else KEYS
    # A run is seen if any of its keys is.
    any_seen = tl.max(tl.reshape(seen.to(tl.int32), (RUNS, KEYS // RUNS)), axis=1) > 0
    owners = blocks_of(table, first + tl.arange(0, RUNS) * (KEYS // RUNS), any_seen, BLOCK_SIZE)
    channel, valid = channels_of(K_COLUMNS, K_HALF, K_DIM)
    inside, mask = head * K_DIM + channel, any_seen[:, None] & valid[None, :]
    units = tl.load(KU + owners * KU_BLOCK + head, mask=any_seen, other=0.0)
    minima = tl.load(KM + (owners * KM_BLOCK)[:, None] + inside[None, :], mask=mask, other=0.0).to(tl.float32)
    steps = tl.load(KS + (owners * KS_BLOCK)[:, None] + inside[None, :], mask=mask, other=0)
    steps = from_small_float(steps, 4) * units[:, None]
    shape: tl.constexpr = (RUNS, KEYS // RUNS, K_COLUMNS)
    steps = tl.reshape(tl.broadcast_to(steps[:, None, :], shape), (KEYS, K_COLUMNS))
    minima = tl.reshape(tl.broadcast_to(minima[:, None, :], shape), (KEYS, K_COLUMNS))
    return minima + codes.to(tl.float32) * steps


@triton.jit
def raw_keys(  # type: ignore[no-untyped-def]
    new_keys, tail, positions, seen, start, begin, slot, ring, key_token, key_head, head,
    KV_HEADS: tl.constexpr, K_DIM: tl.constexpr, K_COLUMNS: tl.constexpr, K_HALF: tl.constexpr,
):  # fmt: skip
    """Keys that are not sealed: of this step's tokens, or of the sequence's tail."""
    channel, valid = channels_of(K_COLUMNS, K_HALF, K_DIM)
    fresh = positions >= start
    new = (begin + positions - start).to(tl.int64) * key_token + head * key_head
    old = ((slot * ring + positions % ring).to(tl.int64) * KV_HEADS + head) * K_DIM
    keys = tl.load(new_keys + new[:, None] + channel[None, :], mask=(seen & fresh)[:, None] & valid[None, :], other=0.0)
    kept = tl.load(tail + old[:, None] + channel[None, :], mask=(seen & ~fresh)[:, None] & valid[None, :], other=0.0)
    return tl.where(fresh[:, None], keys, kept)


@triton.jit
def load_values(  # type: ignore[no-untyped-def]
    V, VS, VZ, table, first, seen, head,
    V_BLOCK: tl.constexpr, VS_BLOCK: tl.constexpr, VZ_BLOCK: tl.constexpr,
    CODEC: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, V_DIM: tl.constexpr,
    V_COLUMNS: tl.constexpr, V_HALF: tl.constexpr, V_RUN: tl.constexpr, KEYS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Values [KEYS, V_COLUMNS] of positions `first`... where `seen`; zero elsewhere."""
    positions = first + tl.arange(0, KEYS)
    blocks = blocks_of(table, positions, seen, BLOCK_SIZE)
    rows = (positions % BLOCK_SIZE) * KV_HEADS + head
    if CODEC == "int4":
        values = _packed_values(
            V, VS, VZ, blocks, rows, seen, V_BLOCK, VS_BLOCK, VZ_BLOCK, V_DIM, V_COLUMNS, V_HALF, V_RUN, KEYS
        )
    else:
        channel, valid = channels_of(V_COLUMNS, 0, V_DIM)
        where = (blocks * V_BLOCK + rows * V_DIM)[:, None] + channel[None, :]
        values = tl.load(V + where, mask=seen[:, None] & valid[None, :], other=0)
        if CODEC == "fp8_e4m3":
            scales = tl.load(VS + blocks * VS_BLOCK + rows, mask=seen, other=0.0)
            values = from_fp8(values).to(tl.float32) * (scales * FP8_FACTOR)[:, None]
        elif CODEC == "int8":
            scales = tl.load(VS + blocks * VS_BLOCK + rows, mask=seen, other=0.0)
            values = values.to(tl.float32) * scales[:, None]
    return values.to(COMPUTE)


@triton.jit
def _packed_values(  # type: ignore[no-untyped-def]
    V, VS, VZ, blocks, rows, seen, V_BLOCK: tl.constexpr, VS_BLOCK: tl.constexpr, VZ_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr, V_COLUMNS: tl.constexpr, V_HALF: tl.constexpr, V_RUN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """fp32. Every V_RUN neighbouring columns have one group."""
    place = tl.arange(0, V_COLUMNS // 2)
    where = (blocks * V_BLOCK + rows * V_HALF)[:, None] + place[None, :]
    codes = unpacked(tl.load(V + where, mask=seen[:, None] & (place < V_HALF)[None, :], other=0), KEYS, V_COLUMNS)
    RUNS: tl.constexpr = V_COLUMNS // V_RUN
    GROUPS: tl.constexpr = (V_DIM + _GROUP - 1) // _GROUP
    HALF_GROUPS: tl.constexpr = (GROUPS + 1) // 2
    run = tl.arange(0, RUNS) * V_RUN
    place = run % (V_COLUMNS // 2)
    channel = run // (V_COLUMNS // 2) * V_HALF + place
    group = channel // _GROUP
    mask = seen[:, None] & ((place < V_HALF) & (channel < V_DIM))[None, :]
    steps = tl.load(VS + (blocks * VS_BLOCK + rows * GROUPS)[:, None] + group[None, :], mask=mask, other=0)
    steps = from_small_float(steps, 3) * 0.25
    at = (blocks * VZ_BLOCK + rows * HALF_GROUPS)[:, None] + (group % HALF_GROUPS)[None, :]
    zeros = (tl.load(VZ + at, mask=mask, other=0) >> (group // HALF_GROUPS * 4).to(tl.uint8)[None, :]) & 15
    zeros = _spread(zeros.to(tl.float32), KEYS, RUNS, V_COLUMNS)
    return (codes.to(tl.float32) - zeros) * _spread(steps, KEYS, RUNS, V_COLUMNS)
