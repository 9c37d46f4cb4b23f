"""Writing a step's keys and values into the pool, quantised as they are written: what needs no other token."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from shared.engine.pool import LayerKV
from shared.kernels.call import Call, power_of_two
from shared.kernels.layer import GROUP, fields, seals
from shared.kernels.meta import StepMeta
from shared.kernels.quantise import (
    EXACT,
    TINY,
    divided,
    from_small_float,
    has_nan,
    nearest,
    scale_of,
    to_fp8,
    to_int8,
    to_small_float,
    within_fp16,
)

_GROUP = tl.constexpr(GROUP)
_NUMBERS = 2048
"""Of keys, and of values, that a program writes: 16 for each of its 128 threads."""


@triton.jit
def _rows_of(tokens, token_blocks, token_offsets, KV_HEADS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's rows, each a (token, head) pair: (token, head, block, place inside it, whether it is written)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // KV_HEADS, row % KV_HEADS
    block = tl.load(token_blocks + token, mask=token < tokens, other=-1).to(tl.int64)
    offset = tl.load(token_offsets + token, mask=token < tokens, other=0)
    return token.to(tl.int64), head, block, offset * KV_HEADS + head, block >= 0  # -1 is padding


@triton.jit
def _write_rows(  # type: ignore[no-untyped-def]
    source, X, XS, block, place, real, X_BLOCK: tl.constexpr, XS_BLOCK: tl.constexpr, CODEC: tl.constexpr,
    DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Keys or values, each row with a scale of its own. `source` [rows] points to them."""
    channel = tl.arange(0, COLUMNS)
    inside = real[:, None] & (channel < DIM)[None, :]
    x = tl.load(source[:, None] + channel[None, :], mask=inside, other=0.0)
    at = X + (block * X_BLOCK + place * DIM)[:, None] + channel[None, :]
    if CODEC == "none":
        tl.store(at, x, mask=inside)
    else:
        x = x.to(tl.float32)
        scale = scale_of(x, 127.0 if CODEC == "int8" else 448.0)
        tl.store(at, to_int8(x, scale) if CODEC == "int8" else to_fp8(x, scale), mask=inside)
        tl.store(XS + block * XS_BLOCK + place, scale, mask=real)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    key, value, K, KS, V, VS, token_blocks, token_offsets, tokens, key_token, key_head, value_token, value_head,
    K_BLOCK: tl.constexpr, KS_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, VS_BLOCK: tl.constexpr,
    CODEC: tl.constexpr, KV_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr,
    K_COLUMNS: tl.constexpr, V_COLUMNS: tl.constexpr,
):  # fmt: skip
    token, head, block, place, real = _rows_of(tokens, token_blocks, token_offsets, KV_HEADS, ROWS)
    keys, values = key + token * key_token + head * key_head, value + token * value_token + head * value_head
    _write_rows(keys, K, KS, block, place, real, K_BLOCK, KS_BLOCK, CODEC, K_DIM, K_COLUMNS)
    _write_rows(values, V, VS, block, place, real, V_BLOCK, VS_BLOCK, CODEC, V_DIM, V_COLUMNS)


@triton.jit
def _of_group(of_groups, groups, wanted, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, GROUPS] fp32 → [rows, PLACES]: the number of group `wanted[p]`, 0 where there is no such group."""
    chosen = groups[None, None, :] == wanted[None, :, None]
    return tl.sum(tl.where(chosen, of_groups[:, None, :], 0.0), axis=2)


@triton.jit
def _half_codes(  # type: ignore[no-untyped-def]
    source, channel, real, step, zero, groups, V_DIM: tl.constexpr, PLACES: tl.constexpr
):
    """Codes [rows, PLACES] of some channels; 0 beyond the last."""
    inside = real[:, None] & (channel < V_DIM)[None, :]
    x = tl.load(source[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    own_step = _of_group(step, groups, channel // _GROUP, PLACES)
    own_zero = _of_group(zero, groups, channel // _GROUP, PLACES)
    # Beyond ±16 steps the code is at its end whatever the zero point.
    ratio = nearest(divided(within_fp16(x), tl.maximum(own_step, TINY)), -16.0, 16.0)
    code = tl.minimum(tl.maximum(ratio + own_zero, 0.0), 15.0)
    return tl.where(inside, code, 0.0).to(tl.uint8)


@triton.jit
def _write_values_in_groups(  # type: ignore[no-untyped-def]
    value, V, VS, VZ, token_blocks, token_offsets, tokens, value_token, value_head,
    V_BLOCK: tl.constexpr, VS_BLOCK: tl.constexpr, VZ_BLOCK: tl.constexpr, KV_HEADS: tl.constexpr,
    V_DIM: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """int4 values, a step and a zero point for each 32 channels of a row."""
    token, head, block, place, real = _rows_of(tokens, token_blocks, token_offsets, KV_HEADS, ROWS)
    source = value + token * value_token + head * value_head
    group = tl.arange(0, GROUPS)
    REAL_GROUPS: tl.constexpr = (V_DIM + _GROUP - 1) // _GROUP

    channel = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = real[:, None, None] & (channel < V_DIM)[None, :, :]
    x = tl.load(source[:, None, None] + channel[None, :, :], mask=inside, other=0.0)
    x = within_fp16(x.to(tl.float32))
    low, high = tl.minimum(tl.min(x, axis=2), 0.0), tl.maximum(tl.max(x, axis=2), 0.0)
    wanted = divided(high - low, tl.full((1, 1), 15.0, tl.float32)) * 4
    steps = to_small_float(tl.where(has_nan(x, 2), float("nan"), wanted), 3)
    step = from_small_float(steps, 3) * 0.25
    zero = nearest(divided(-low, tl.maximum(step, TINY)), 0.0, 15.0)
    at = VS + (block * VS_BLOCK + place * REAL_GROUPS)[:, None] + group[None, :]
    tl.store(at, steps, mask=real[:, None] & (group < REAL_GROUPS)[None, :])

    HALF_GROUPS: tl.constexpr = (REAL_GROUPS + 1) // 2
    zero = tl.where((group < REAL_GROUPS)[None, :], zero, 0.0)
    pairs = zero + _of_group(zero, group, group + HALF_GROUPS, GROUPS) * 16
    at = VZ + (block * VZ_BLOCK + place * HALF_GROUPS)[:, None] + group[None, :]
    tl.store(at, pairs.to(tl.uint8), mask=real[:, None] & (group < HALF_GROUPS)[None, :])

    HALF: tl.constexpr = (V_DIM + 1) // 2
    byte = tl.arange(0, PLACES)
    lower = _half_codes(source, byte, real, step, zero, group, V_DIM, PLACES)
    upper = _half_codes(source, byte + HALF, real, step, zero, group, V_DIM, PLACES)
    at = V + (block * V_BLOCK + place * HALF)[:, None] + byte[None, :]
    tl.store(at, lower | (upper << 4), mask=real[:, None] & (byte < HALF)[None, :])


def write(kv: LayerKV, meta: StepMeta, key: Tensor, value: Tensor) -> Call:
    """The launch that puts the step's values, and its keys if they are not sealed, into the pool.

    key and value [tokens, kv_heads, dim]; each vector contiguous.
    """
    shape, tokens = kv.shape, key.shape[0]
    pointers, constants = fields(kv)
    where = {"tokens": tokens, "token_blocks": meta.token_blocks, "token_offsets": meta.token_offsets}
    given: dict[str, Any] = {"value": value, "value_token": value.stride(0), "value_head": value.stride(1), **where}
    sizes: dict[str, Any] = {"KV_HEADS": shape.kv_heads, "V_DIM": shape.v_dim}
    if seals(kv):
        names: tuple[str, ...] = ("V", "VS", "VZ")
        groups = -(-shape.v_dim // GROUP)
        sizes |= {"GROUPS": power_of_two(groups), "PLACES": power_of_two(-(-shape.v_dim // 2))}
        kernel = _write_values_in_groups
    else:
        names = ("K", "KS", "V", "VS")
        given |= {"key": key, "key_token": key.stride(0), "key_head": key.stride(1)}
        sizes |= {"K_DIM": shape.k_dim, "K_COLUMNS": power_of_two(shape.k_dim), "V_COLUMNS": power_of_two(shape.v_dim)}
        sizes["CODEC"] = kv.codec.name
        kernel = _write
    given |= {name: pointers[name] for name in names if name in pointers}
    sizes |= {name: None for name in names if name not in pointers}
    sizes |= {f"{name}_BLOCK": constants[f"{name}_BLOCK"] for name in names}
    sizes["ROWS"] = max(1, _NUMBERS // power_of_two(max(shape.k_dim, shape.v_dim)))
    programs = -(-tokens * shape.kv_heads // sizes["ROWS"])
    return Call(kernel, (programs,), given, sizes, options=EXACT)
