"""What a loaded model's layers really store, and whether our attention gives what its own gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shared.engine.attention import NAME, Features, attend, attending
from shared.engine.batch import Tile
from shared.engine.codecs.base import LayerShape
from shared.errors import ModelError

_PROBE_TOKENS = 3
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference of logits from the model's own attention, relative to the largest logit."""


@dataclass
class _Probe:
    """Plain causal attention over a few tokens that notes which layer stores what."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, features: Features) -> Tensor:
        if layer in self.shapes:
            raise ModelError(f"layer {layer} attends twice in one pass")
        self.shapes[layer] = LayerShape(key.shape[0], key.shape[2], value.shape[2])
        if query.shape[0] % key.shape[0]:
            raise ModelError(f"{query.shape[0]} query heads do not divide into {key.shape[0]} KV heads")
        share, tokens = query.shape[0] // key.shape[0], query.shape[1]
        mask = torch.full((tokens, tokens), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
        tile = Tile(0, tokens, 0, tokens, mask.repeat(share, 1))
        rows = query.reshape(1, key.shape[0], share * tokens, -1)
        out = attend(rows, key[None], value[None], tile, features, share)
        return out.reshape(*query.shape[:2], -1).transpose(0, 1)


def probe(module: Any, layers: int, dtype: torch.dtype, device: torch.device) -> tuple[LayerShape, ...]:
    """The shapes that the layers really hand over, from a pass over three tokens; compared with the model's own."""
    sink = _Probe()
    kind = module.config.get_text_config().model_type
    tokens = torch.arange(1, 1 + _PROBE_TOKENS, device=device)[None]  # distinct, or attention would not matter
    try:
        with torch.inference_mode(), attending(sink):
            ours = module(input_ids=tokens, use_cache=False).logits
            module.set_attn_implementation("eager")
            theirs = module(input_ids=tokens, use_cache=False).logits
            module.set_attn_implementation(NAME)
    except (AttributeError, RuntimeError, TypeError, ValueError, LookupError) as error:
        raise ModelError(f"{kind} cannot be run over paged KV: {error}") from error
    if sorted(sink.shapes) != list(range(layers)):
        raise ModelError(
            f"{kind} has {layers} layers of which {len(sink.shapes)} use the attention interface: the state of the "
            "others would not be in the KV pool"
        )
    difference = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))
    if not difference <= _PROBE_TOLERANCE[dtype]:
        raise ModelError(f"{kind} attends in a way that is not passed on: logits differ by {difference:.2g}")
    return tuple(sink.shapes[i] for i in range(layers))
