"""Two codes of four bits to a byte, and steps of eight bits."""

from __future__ import annotations

import torch
from torch import Tensor


def packed(count: int) -> int:
    """Bytes for `count` codes."""
    return -(-count // 2)


def pack(codes: Tensor) -> Tensor:
    """uint8 [..., n], each below 16 → [..., ceil(n / 2)]: i in the low half of byte i, i + ceil(n / 2) in the high."""
    half = packed(codes.shape[-1])
    out = codes[..., :half].clone()
    out[..., : codes.shape[-1] - half] |= codes[..., half:] << 4
    return out


def unpack(data: Tensor, count: int, out: Tensor) -> Tensor:
    """The first `count` codes of `data` [..., ceil(count / 2)] as numbers, into `out` [..., at least count]."""
    half = data.shape[-1]
    out[..., :half] = data & 15
    out[..., half:count] = (data >> 4)[..., : count - half]
    return out


def to_small_float(numbers: Tensor, mantissa: int) -> Tensor:
    """float32 in [0, 1.9375] for 4 bits of mantissa, or in [0, 61440] for 3 → uint8, to nearest, half up.

    The code is the upper bits of the float16 without its sign, and without its top exponent bit where mantissa is 4,
    as the numbers are below 2 then. With 3, NaN stays NaN.
    """
    drop = 10 - mantissa
    bits = numbers.half().view(torch.int16)
    return ((bits + (1 << (drop - 1))) >> drop).to(torch.uint8)


def from_small_float(codes: Tensor, mantissa: int) -> Tensor:
    """float32."""
    return (codes.to(torch.int16) << (10 - mantissa)).view(torch.float16).float()
