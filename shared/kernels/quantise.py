"""Numbers to codes, in kernels, with the arithmetic of `shared.engine.codecs`: fp32, division correctly rounded, ties
to even, NaN stays NaN. Launch with `EXACT`, so that no product is fused with a sum."""

from __future__ import annotations

import triton
import triton.language as tl

EXACT = {"enable_fp_fusion": False}
TINY = tl.constexpr(2.0**-126)
_HUGE = tl.constexpr(2.0**120)


@triton.jit
def divided(x, y):  # type: ignore[no-untyped-def]
    """x / y of tensors that broadcast."""
    x, y = tl.broadcast(x, y)
    return tl.div_rn(x, y)


@triton.jit
def nearest(x, LOW: tl.constexpr, HIGH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nearest integer from LOW to HIGH; LOW for NaN. Adding 1.5 * 2^23 leaves no room for a fraction."""
    x = tl.minimum(tl.maximum(tl.where(x == x, x, LOW), LOW), HIGH)
    return (x + 12582912.0) - 12582912.0


@triton.jit
def has_nan(x, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.max((x != x).to(tl.int32), axis=AXIS) > 0


@triton.jit
def scale_of(x, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [rows, columns] → [rows]: what a code of 1 stands for when the largest is LARGEST."""
    top = tl.max(tl.abs(x), axis=1)
    scale = tl.minimum(tl.maximum(divided(top, tl.full((1,), LARGEST, tl.float32)), TINY), _HUGE)
    return tl.where(has_nan(x, 1), float("nan"), scale)


@triton.jit
def to_int8(x, scale):  # type: ignore[no-untyped-def]
    """x [rows, columns], scale [rows]."""
    return nearest(divided(x, scale[:, None]), -127.0, 127.0).to(tl.int8)


@triton.jit
def to_fp8(x, scale):  # type: ignore[no-untyped-def]
    """e4m3 bytes. In integers, because not every target has the type."""
    x = divided(x, scale[:, None])
    x = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -448.0), 448.0)
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal: the mantissa rounded to 3 bits, the exponent counted from 7 instead of 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2^-6 in steps of 2^-9: adding 2^23 leaves the integer in the lowest bits.
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(size < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_small_float(x, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """x >= 0 → the upper bits of its fp16, half up; NaN → a code of 3 bits of mantissa that reads as NaN."""
    DROP: tl.constexpr = 10 - MANTISSA
    bits = x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    return tl.where(x == x, (bits + (1 << (DROP - 1))) >> DROP, 0xFC).to(tl.uint8)


@triton.jit
def from_small_float(codes, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    return (codes.to(tl.uint16) << (10 - MANTISSA)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def within_fp16(x):  # type: ignore[no-untyped-def]
    """Saturated; NaN stays."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -65504.0), 65504.0), x)
