"""What kernels know of a layer's share of the pool: its fields, and the constants that say how to read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared.engine.codecs.base import PerBlock
from shared.engine.pool import LayerKV
from shared.errors import ConfigError
from shared.kernels.call import power_of_two

_FIELDS: dict[str, dict[str, str]] = {
    "none": {"K": "keys", "V": "values"},
    "int8": {"K": "keys", "KS": "key_scales", "V": "values", "VS": "value_scales"},
    "fp8_e4m3": {"K": "keys", "KS": "key_scales", "V": "values", "VS": "value_scales"},
    "int4": {
        "K": "keys", "KS": "key_steps", "KM": "key_mins", "KU": "key_units",
        "V": "values", "VS": "value_steps", "VZ": "value_zeros",
    },
}  # fmt: skip
"""Kernel argument → field. S: scales or steps, M: minima, U: units of the steps, Z: zero points."""
_ARGUMENTS = ("K", "KS", "KM", "KU", "V", "VS", "VZ")

GROUP = 32
"""Channels of a value that share a step, in codec int4."""


def seals(kv: LayerKV) -> bool:
    return isinstance(kv.codec, PerBlock)


def fields(kv: LayerKV) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(pointers, constants) of the layer. The constant X_BLOCK is the distance of two blocks in field X, in elements;
    a constant, because knowing its factors lets loads be wide. Raises ConfigError for a codec without kernels."""
    if kv.codec.name not in _FIELDS:
        raise ConfigError(f"there are no Triton kernels for the KV codec {kv.codec.name!r}", field="kv_codec")
    names = _FIELDS[kv.codec.name]
    pointers: dict[str, Tensor] = {}
    constants: dict[str, Any] = {}
    for argument in _ARGUMENTS:
        if argument in names:
            view = kv.views[names[argument]]
            # Not every target has fp8; the kernels decode its bytes themselves.
            pointers[argument] = view.view(torch.uint8) if view.dtype == torch.float8_e4m3fn else view
            constants[f"{argument}_BLOCK"] = view.stride(0)
        else:
            constants[argument], constants[f"{argument}_BLOCK"] = None, 0
    return pointers, constants


def columns(dim: int, packed: bool) -> tuple[int, int]:
    """(columns, half) of a matrix that holds vectors of `dim` channels.

    Plain: a power of two, 16 or more, column c being channel c; `half` is 0. Packed two to a byte, the first half of
    the channels with the second: each half is padded to a power of two by itself, and has `half` channels.
    """
    if not packed:
        return max(16, power_of_two(dim)), 0
    half = -(-dim // 2)
    return 2 * max(8, power_of_two(half)), half
