"""Four bits per number: keys with a step and a minimum per channel over the block, values per token in groups of 32.

Keys of real models have channels that are large all the time; a scale across channels would leave nothing of the
others, one along the channel costs them nothing (KIVI, arXiv 2402.02750). Values have no such channels. Bytes of a
block (B = block_size, H = kv_heads, G = ceil(v_dim / 32)), each array contiguous:

    keys         uint8   [B, H, ceil(k_dim / 2)]   two codes a byte: number i in the low half of byte i,
    values       uint8   [B, H, ceil(v_dim / 2)]   i + ceil(n / 2) in the high half
    key_mins     float16 [H, k_dim]
    key_steps    uint8   [H, k_dim]                floats of 4 exponent and 4 mantissa bits, relative to key_units
    key_units    float32 [H]
    value_steps  uint8   [B, H, G]                 floats of 5 exponent and 3 mantissa bits
    value_zeros  uint8   [B, H, ceil(G / 2)]       two to a byte, as the codes

    key   = float32(key_mins) + code * (key_units * float16_from_bits(key_steps << 6))
    value = (code - zero) * (float16_from_bits(value_steps << 7) / 4)

All in float32, elementwise or by minimum and maximum: the same numbers give the same bytes whatever stands beside them.
Magnitudes beyond 65,504 saturate. NaN stays NaN. Steps are rounded to nearest, so that the ends of a range may be
clipped by 1/32 of it (keys, half on each side) or 1/16 (values). Against rounding up that lowers the divergence that
keys cause by about a third, and changes nothing measurable for values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.codecs.base import Field, LayerShape, PerBlock, Views
from shared.engine.codecs.packing import from_small_float, pack, packed, to_small_float, unpack

GROUP = 32
_TOP = 15
_HALF = 65504.0
_UNIT = 1.9375
"""The largest float of 4 exponent and 4 mantissa bits."""
_TINY = 2.0**-126


class Int4(PerBlock):
    name = "int4"

    def fields(self, shape: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Field, ...]:
        heads, groups = shape.kv_heads, -(-shape.v_dim // GROUP)
        return (
            Field("keys", torch.uint8, (block_size, heads, packed(shape.k_dim))),
            Field("values", torch.uint8, (block_size, heads, packed(shape.v_dim))),
            Field("key_mins", torch.float16, (heads, shape.k_dim)),
            Field("key_steps", torch.uint8, (heads, shape.k_dim)),
            Field("key_units", torch.float32, (heads,)),
            Field("value_steps", torch.uint8, (block_size, heads, groups)),
            Field("value_zeros", torch.uint8, (block_size, heads, packed(groups))),
        )

    def seal_keys(self, views: Views, blocks: Tensor, keys: Tensor) -> None:
        keys = keys.float().clamp(-_HALF, _HALF)
        low, high = keys.amin(1), keys.amax(1)
        wanted = (high - low) / _TOP
        units = (wanted.amax(-1, keepdim=True) / _UNIT).clamp_min(_TINY)
        codes = to_small_float(wanted / units, 4)
        steps = units * from_small_float(codes, 4)
        # What nearest rounding leaves over or cuts off is shared by both ends.
        mins = ((low + high) / 2 - steps * (_TOP / 2)).clamp(-_HALF, _HALF).half()
        ratios = (keys - mins.float()[:, None]) / steps.clamp_min(_TINY)[:, None]
        views["keys"].index_copy_(0, blocks, pack(ratios.round_().clamp_(0, _TOP).to(torch.uint8)))
        views["key_mins"].index_copy_(0, blocks, mins)
        views["key_steps"].index_copy_(0, blocks, codes)
        views["key_units"].index_copy_(0, blocks, units.squeeze(-1))

    def write_values(self, views: Views, blocks: Tensor, offsets: Tensor, values: Tensor) -> None:
        dim, groups = values.shape[-1], views["value_steps"].shape[-1]
        values = values.float().clamp(-_HALF, _HALF)
        padded = torch.nn.functional.pad(values, (0, groups * GROUP - dim)).view(*values.shape[:-1], groups, GROUP)
        low, high = padded.amin(-1).clamp_max(0), padded.amax(-1).clamp_min(0)
        steps = to_small_float((high - low) / _TOP * 4, 3)
        step = (from_small_float(steps, 3) / 4).clamp_min(_TINY)
        zeros = (-low / step).round_().clamp_(0, _TOP)
        codes = ((padded / step[..., None]).round_() + zeros[..., None]).clamp_(0, _TOP).to(torch.uint8)
        views["values"].index_put_((blocks, offsets), pack(codes.flatten(-2)[..., :dim]))
        views["value_steps"].index_put_((blocks, offsets), steps)
        views["value_zeros"].index_put_((blocks, offsets), pack(zeros.to(torch.uint8)))

    def read_keys(self, views: Views, blocks: Tensor, shape: LayerShape, dtype: torch.dtype) -> Tensor:
        data = views["keys"].index_select(0, blocks)
        codes = unpack(data, shape.k_dim, data.new_empty(*data.shape[:-1], shape.k_dim, dtype=torch.float32))
        steps = from_small_float(views["key_steps"].index_select(0, blocks), 4)
        steps *= views["key_units"].index_select(0, blocks)[..., None]
        mins = views["key_mins"].index_select(0, blocks).float()
        return codes.mul_(steps[:, None]).add_(mins[:, None]).to(dtype)

    def read_values(self, views: Views, blocks: Tensor, shape: LayerShape, dtype: torch.dtype) -> Tensor:
        data = views["values"].index_select(0, blocks)
        steps = from_small_float(views["value_steps"].index_select(0, blocks), 3).mul_(0.25)
        zeros = unpack(views["value_zeros"].index_select(0, blocks), steps.shape[-1], torch.empty_like(steps))
        values = data.new_empty(*data.shape[:-1], steps.shape[-1] * GROUP, dtype=torch.float32)
        groups = unpack(data, shape.v_dim, values).view(*steps.shape, GROUP)
        groups.sub_(zeros[..., None]).mul_(steps[..., None])
        return values[..., : shape.v_dim].to(dtype)
