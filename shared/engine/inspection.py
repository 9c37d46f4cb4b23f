"""What a model hands to its attention function, and whether that is all known here.

The model runs once under an attention implementation that only looks. Its masks say, for any query and key, who sees
whom, far beyond the few tokens of the pass: a window or a chunk that never reaches the attention function is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from shared.engine.codecs.base import LayerShape
from shared.errors import ModelError

NAME = "trine_inspection"

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""(batch, head, query positions, key positions) → which keys are seen. Given tensors, they broadcast."""

_USED = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
_HARMLESS = frozenset({"position_ids", "logits_to_keep"})
"""Passed on by models that pass on all they get; queries and keys have their positions already."""


@dataclass
class Inspection:
    """What was seen, layer by layer. `context_length` bounds the positions that masks are asked about."""

    context_length: int
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    _masks: dict[int, tuple[Tensor, MaskFunction]] = field(default_factory=dict)
    """By identity of the tensor that stands for the mask."""
    _right: set[tuple[int, int | None]] = field(default_factory=set)
    """Masks, by identity, that are those of a window; layers share them."""

    def mask(self, function: MaskFunction, device: torch.device | str) -> Tensor:
        stand_in = torch.zeros(1, 1, 1, 1, device=device)
        self._masks[id(stand_in)] = stand_in, function
        return stand_in

    def call(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Any, arguments: dict[str, Any]) -> None:
        """Raises ModelError, naming what cannot be served."""
        if layer in self.shapes:
            raise ModelError(f"layer {layer} attends twice in one pass")
        if key.shape[2] != query.shape[2]:
            raise ModelError(f"layer {layer} attends to {key.shape[2]} keys where {query.shape[2]} tokens are given")
        if query.shape[1] % key.shape[1]:
            raise ModelError(f"{query.shape[1]} query heads do not divide into {key.shape[1]} KV heads")
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        for name, argument in arguments.items():
            if _matters(name, argument):
                raise ModelError(f"layer {layer} passes {name} to attention, which is not known here")
        self._check_mask(layer, mask, arguments.get("sliding_window") or None)

    def _check_mask(self, layer: int, mask: Any, window: int | None) -> None:
        _, function = self._masks.get(id(mask), (None, None))
        if function is None:
            raise ModelError(f"layer {layer} has {'no mask' if mask is None else 'a mask of its own making'}")
        if (id(mask), window) in self._right:
            return
        points = _points(self.context_length, window)
        queries, keys = points[:, None], points[None, :]
        expected = keys <= queries
        if window is not None:
            expected = expected & (keys > queries - window)
        seen = torch.broadcast_to(function(0, 0, queries, keys), expected.shape)
        wrong = (seen.cpu() != expected).nonzero()
        if len(wrong):
            query, key = (int(points[i]) for i in wrong[0])
            sees = "sees" if expected[tuple(wrong[0])].logical_not() else "does not see"
            raise ModelError(f"in layer {layer} position {query} {sees} {key}, and attention is not told so")
        self._right.add((id(mask), window))


def _matters(name: str, argument: Any) -> bool:
    if name == "is_causal":
        return argument is False  # true is what is done anyway
    if name in _USED or name in _HARMLESS or argument is None:
        return False
    return isinstance(argument, Tensor) or bool(argument)


def _points(context_length: int, window: int | None) -> Tensor:
    """Positions where a pattern of attention would show: both ends, powers of two, the window's edges."""
    near = {edge + i for edge in (0, *(1 << n for n in range(31)), context_length) for i in (-1, 0, 1)}
    if window is not None:
        near |= {start + window + i for start in tuple(near) for i in (-1, 0, 1)}
    return torch.tensor(sorted(point for point in near if 0 <= point < context_length))


_current: ContextVar[Inspection] = ContextVar("attention_inspection")


@contextmanager
def inspecting(inspection: Inspection) -> Iterator[None]:
    """Within, models set to the attention implementation NAME report to `inspection`."""
    token = _current.set(inspection)
    try:
        yield
    finally:
        _current.reset(token)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **arguments: Any
) -> tuple[Tensor, None]:
    _current.get().call(module.layer_idx, query, key, value, attention_mask, arguments)
    out = scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )  # any finite numbers would do
    return out.transpose(1, 2).contiguous(), None


def _mask(*, mask_function: MaskFunction, device: torch.device | str = "cpu", **_: Any) -> Tensor:
    return _current.get().mask(mask_function, device)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
