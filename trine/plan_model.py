"""What a plan has to know of a model: how much it weighs, and how large its KV is. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

BLOCK_SIZE = 16
CODECS = ("none", "int8", "fp8_e4m3", "int4")
_ALIGN = 16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`params`: all weights; `active`: those that a token is multiplied with (fewer in a mixture of experts)."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    k_dim: int
    """Numbers of a key of one head …"""
    v_dim: int
    """… and of a value."""
    params: float
    active: float
    dtype_bytes: int = 2
    """Of a weight."""
    kv_dtype_bytes: int = 2
    """Of a number in KV without a codec."""

    @property
    def weight_bytes(self) -> float:
        return self.params * self.dtype_bytes

    def read_bytes(self, positions: float) -> float:
        """Of weights that a step of so many positions reads: all that any of them is multiplied with.

        Each position is taken to draw its experts by itself; what all share is in the share that each needs.
        """
        unread = math.pow(1.0 - self.active / self.params, positions)
        return self.weight_bytes * (1.0 - unread)

    def kv_bytes(self, codec: str = "none", block_size: int = BLOCK_SIZE) -> float:
        """Bytes of KV of one token: a block's, by the layouts of `shared/engine/codecs`, over its tokens."""
        rows = block_size * self.kv_heads
        if codec == "none":
            fields = [rows * self.k_dim * self.kv_dtype_bytes, rows * self.v_dim * self.kv_dtype_bytes]
        elif codec in ("int8", "fp8_e4m3"):
            fields = [rows * self.k_dim, rows * self.v_dim, rows * 4, rows * 4]
        else:
            groups, channels = -(-self.v_dim // 32), self.kv_heads * self.k_dim
            fields = [rows * -(-self.k_dim // 2), rows * -(-self.v_dim // 2), channels * 2, channels, self.kv_heads * 4]
            fields += [rows * groups, rows * -(-groups // 2)]
        return self.layers * sum(-(-field // _ALIGN) * _ALIGN for field in fields) / block_size

    def flops(self, context: float) -> float:
        """Of one token behind `context` others: two for each weight, and for each number that each head reads."""
        return 2 * self.active + 2 * self.layers * self.heads * (self.k_dim + self.v_dim) * context
