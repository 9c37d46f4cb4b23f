"""One scale per token and head: the largest magnitude of the row becomes the largest code.

Bytes, for keys and values alike, all contiguous per block:

    keys, values              [block_size, kv_heads, dim]   int8 or float8_e4m3fn codes
    key_scales, value_scales  [block_size, kv_heads]        float32

    scale = clamp(max |x| / LIMIT, 2^-126, 2^120)
    int8  (LIMIT 127):  code = clamp(rint(x / scale), -127, 127), half to even
    e4m3  (LIMIT 448):  code = e4m3(clamp(x / scale, -448, 448)), to nearest, half to even
    number = float32(code) * scale

All in float32 with correctly rounded division, each row by itself, so the same numbers give the same bytes whatever
stands beside them. A row of zeros stays zeros. e4m3 has no infinity and turns what exceeds 448 into NaN (OCP 8-bit
Floating Point Specification, 5.2), hence the clamp before the cast. A row with a NaN has a NaN scale and reads as NaN.
Magnitudes beyond 10^38 saturate.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from shared.engine.codecs.base import Field, LayerShape, PerToken, Views

_SMALLEST, _LARGEST = 2.0**-126, 2.0**120
"""Of scales: never zero or subnormal, and LIMIT times one is never infinite."""


class Scaled(PerToken):
    codes: torch.dtype
    limit: float

    @abstractmethod
    def encode(self, ratios: Tensor) -> Tensor:
        """Codes of float32 numbers within `limit`; only rounding can have put them outside."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """float32, a tensor of its own."""

    def fields(self, shape: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Field, ...]:
        rows = (block_size, shape.kv_heads)
        return (
            Field("keys", self.codes, (*rows, shape.k_dim)),
            Field("values", self.codes, (*rows, shape.v_dim)),
            Field("key_scales", torch.float32, rows),
            Field("value_scales", torch.float32, rows),
        )

    def write_keys(self, views: Views, blocks: Tensor, offsets: Tensor, keys: Tensor) -> None:
        self._write(views["keys"], views["key_scales"], blocks, offsets, keys)

    def write_values(self, views: Views, blocks: Tensor, offsets: Tensor, values: Tensor) -> None:
        self._write(views["values"], views["value_scales"], blocks, offsets, values)

    def read_keys(self, views: Views, blocks: Tensor, shape: LayerShape, dtype: torch.dtype) -> Tensor:
        return self._read(views["keys"], views["key_scales"], blocks, dtype)

    def read_values(self, views: Views, blocks: Tensor, shape: LayerShape, dtype: torch.dtype) -> Tensor:
        return self._read(views["values"], views["value_scales"], blocks, dtype)

    def _write(self, codes: Tensor, scales: Tensor, blocks: Tensor, offsets: Tensor, numbers: Tensor) -> None:
        numbers = numbers.float()
        scale = (numbers.abs().amax(-1, keepdim=True) / self.limit).clamp(_SMALLEST, _LARGEST)
        encoded = self.encode((numbers / scale).clamp_(-self.limit, self.limit))
        codes.view(torch.uint8).index_put_((blocks, offsets), encoded.view(torch.uint8))
        scales.index_put_((blocks, offsets), scale.squeeze(-1))

    def _read(self, codes: Tensor, scales: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        gathered = codes.view(torch.uint8).index_select(0, blocks).view(self.codes)
        return self.decode(gathered).mul_(scales.index_select(0, blocks)[..., None]).to(dtype)


class Int8(Scaled):
    name = "int8"
    codes = torch.int8
    limit = 127.0

    def encode(self, ratios: Tensor) -> Tensor:
        return ratios.round_().to(torch.int8)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float()


class Fp8E4M3(Scaled):
    name = "fp8_e4m3"
    codes = torch.float8_e4m3fn
    limit = 448.0

    def encode(self, ratios: Tensor) -> Tensor:
        return ratios.to(torch.float8_e4m3fn)

    def decode(self, codes: Tensor) -> Tensor:
        """By way of float16, whose exponent has one bit more and counts from 8 lower: CPUs are slow at the cast."""
        if not codes.is_cpu:
            return codes.float()
        wide = (
            codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
        )  # s eeee mmm → s 0eeee mmm…
        return wide.view(torch.float16).float().mul_(256.0)
