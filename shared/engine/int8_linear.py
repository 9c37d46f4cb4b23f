"""Linear layers with weights of 8 bits, a quarter of the memory that decoding has to read.

Weights have a scale per row. An input row has a scale of its own and two digits to base 126 per number, together 14
bits: each digit goes through the 8-bit kernel as a row, so that decoding, which waits for weights, hardly pays for the
second one, and the only error worth naming is that of the weights.

Products are added up as integers, exactly: a row's result does not depend, by a single bit, on the other rows. Digits
are at most 63, so that activations take 7 bits: without VNNI the kernel adds pairs of 8-bit products in 16 bits, where
8-bit activations would saturate.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shared.engine.merged import Product, Run, take_over
from shared.errors import ConfigError

_ENGINE = "fbgemm"
_LEVELS = 127
"""Weights are -127 ... 127 times their row's scale."""
_DIGIT = 63
"""Digits are -63 ... 63; the kernel takes unsigned ones, so that zero is `_ZERO`."""
_ZERO = 64
_BASE = 2 * _DIGIT
_LARGEST = torch.tensor([_DIGIT, _DIGIT * _BASE], dtype=torch.float32).view(2, 1, 1)
"""What a row's largest number becomes, in units of either digit."""
_TINY = 1e-30
"""Largest number of a row of zeros, which is divided by."""


def is_available() -> bool:
    """Whether this CPU and this build of torch have an 8-bit kernel."""
    return _ENGINE in torch.backends.quantized.supported_engines


def quantise(runs: Sequence[Run]) -> None:
    """Let the layers of a model on the CPU multiply in 8 bits. Embeddings stay as they are. Raises ConfigError."""
    if not is_available():
        raise ConfigError("int8 weights need torch's fbgemm kernels, for x86 CPUs", field="weights")

    for run in runs:
        take_over(run, int8_product(run.weight(), run.bias()))


def int8_product(weight: Tensor, bias: Tensor | None) -> Product:
    """`weight` [out, in] is quantised into a copy: per row, the largest number becomes 127."""
    scale = weight.abs().amax(1).clamp_(min=_TINY).div_(_LEVELS)
    levels = (weight / scale[:, None]).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
    return levels_product(levels, scale, bias)


def levels_product(levels: Tensor, scale: Tensor, bias: Tensor | None = None) -> Product:
    """For weights that are quantised already: `levels` [out, in] int8 times the `scale` [out] of their row."""
    packed = _pack(levels, scale)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

    def product(x: Tensor) -> Tensor:
        digits, factor = split(x)
        high, low = multiply(digits.flatten(0, 1), 1.0, _ZERO, packed).view(2, x.shape[0], -1).unbind()
        out = torch.add(high, low, alpha=1 / _BASE).div_(factor)
        return out if bias is None else out.add_(bias)

    return product


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, in] → high and low digits [2, rows, in], and factor [rows, 1]. The kernel rounds the low ones.

    `(high + low / 126) / factor` is x to within 1 / 15,876 of the row's largest number.
    """
    factors = torch.div(_LARGEST, x.abs().amax(1, keepdim=True).clamp_(min=_TINY))
    digits = x * factors
    high, low = digits.unbind()
    low.sub_(high.round_(), alpha=_BASE)
    return digits, factors[0]


def _pack(levels: Tensor, scale: Tensor) -> Any:
    zero = torch.zeros(len(scale), dtype=torch.int64)
    with _fbgemm(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantised tensors will go some day; the kernel takes no others
        quantised = torch._make_per_channel_quantized_tensor(levels.contiguous(), scale.double(), zero, 0)
        return torch.ops.quantized.linear_prepack(quantised, None)


@contextmanager
def _fbgemm() -> Iterator[None]:
    """torch's choice by default is another kernel on some CPUs, which does not give float results."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = _ENGINE
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
