"""A kernel launch as a value: what runs, on what, with which constants. So it can also be compiled without a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` change from step to step (tensors, integers, floats); each set of `constants` is compiled once.

    A tensor that a variant does not use is None among the constants.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        if 0 not in self.grid:
            self.kernel[self.grid](
                **self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages, **self.options
            )


def interpreting() -> bool:
    """Kernels run in Triton's interpreter (TRITON_INTERPRET=1), which is read when a kernel is defined."""
    return bool(triton.knobs.runtime.interpret)


def compute_type(dtype: torch.dtype) -> Any:
    """What matrices are multiplied in. The interpreter's products of bf16 matrices are garbage, so there it is fp32."""
    if interpreting() or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def power_of_two(n: int) -> int:
    """The least one that is at least `n` (1 at least)."""
    return 1 << max(n - 1, 0).bit_length()
