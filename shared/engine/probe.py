"""What a loaded model's layers really store, and whether over paged KV it gives what it gives by itself.

Two sequences go through in one flat row, interleaved and out of order, one at the start of the context and one at its
end. They must come out as the model's own attention gives them one by one. So a model is refused if anything but
attention mixes tokens (convolutions, recurrent state), if it ignores the positions it is given, or if what it makes of
a token depends on who else is in the batch (dynamic rope).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.engine import inspection
from shared.engine.attention import NAME, Features, attend, attending
from shared.engine.batch import Tile
from shared.engine.codecs.base import LayerShape
from shared.engine.inspection import Inspection, inspecting
from shared.errors import ModelError

_PROBE_TOKENS = 3
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference of logits from the model's own attention, relative to the largest logit."""
_SHUFFLED = (5, 0, 2, 3, 1, 4)
"""Tokens of both sequences, in the order of the row."""


@dataclass
class _Row:
    """The sink for a row of several sequences that have no past. `sequences` and `positions` are [tokens]."""

    sequences: Tensor
    positions: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, features: Features) -> Tensor:
        share, tokens = query.shape[0] // key.shape[0], query.shape[1]
        ahead = self.positions[:, None] - self.positions
        hidden = (self.sequences[:, None] != self.sequences) | (ahead < 0)
        if features.window is not None:
            hidden |= ahead >= features.window
        mask = torch.zeros(tokens, tokens, dtype=query.dtype, device=query.device).masked_fill(hidden, -torch.inf)
        rows = query.reshape(1, key.shape[0], share * tokens, -1)
        out = attend(rows, key[None], value[None], Tile(0, tokens, 0, tokens, mask.repeat(share, 1)), features, share)
        return out.reshape(*query.shape[:2], -1).transpose(0, 1).contiguous()


def probe(
    module: Any, layers: int, context_length: int, dtype: torch.dtype, device: torch.device
) -> tuple[LayerShape, ...]:
    """The shapes that the layers hand over. Raises ModelError, with the reason, for what would not be exact."""
    kind = module.config.get_text_config().model_type
    try:
        with torch.inference_mode():
            shapes = _inspected(module, layers, context_length, device)
            difference = _difference(module, context_length, device)
    except ModelError as error:
        raise ModelError(f"{kind}: {error}") from None
    except (AttributeError, RuntimeError, TypeError, ValueError, LookupError) as error:
        raise ModelError(f"{kind} cannot be run over paged KV: {error}") from error
    finally:
        module.set_attn_implementation(NAME)
    if not difference <= _PROBE_TOLERANCE[dtype]:
        raise ModelError(
            f"{kind} over paged KV gives other logits than by itself (they differ by {difference:.2g}): something that "
            "the attention function is not told of decides them"
        )
    return shapes


def _inspected(module: Any, layers: int, context_length: int, device: torch.device) -> tuple[LayerShape, ...]:
    found = Inspection(context_length)
    module.set_attn_implementation(inspection.NAME)
    tokens = torch.ones(1, 2, dtype=torch.int64, device=device)
    with inspecting(found):
        module(input_ids=tokens, attention_mask=tokens, use_cache=False, logits_to_keep=tokens[0])
    if sorted(found.shapes) != list(range(layers)):
        raise ModelError(
            f"of {layers} layers {len(found.shapes)} use the attention interface; "
            "what the others remember would not be in the KV pool"
        )
    return tuple(found.shapes[i] for i in range(layers))


def _difference(module: Any, context_length: int, device: torch.device) -> float:
    """Of logits, relative to the largest."""
    count, middle = _PROBE_TOKENS, module.get_output_embeddings().weight.shape[0] // 2
    token_ids = torch.arange(middle, middle + 2 * count, device=device)  # distinct, or attention would not matter
    start = torch.arange(count, device=device)
    positions = torch.cat([start, start + context_length - count])
    order = torch.tensor(_SHUFFLED, device=device)
    back = torch.argsort(order)
    module.set_attn_implementation(NAME)
    with attending(_Row(order // count, positions[order])):
        ours = module(
            input_ids=token_ids[order][None], position_ids=positions[order][None], use_cache=False, logits_to_keep=back
        ).logits[0]
    module.set_attn_implementation("eager")
    first = module(input_ids=token_ids[None, :count], use_cache=False).logits[0]
    second = module(input_ids=token_ids[None, count:], position_ids=positions[None, count:], use_cache=False).logits[0]
    theirs = torch.cat([first, second])
    if ours.shape != theirs.shape:
        raise ModelError(f"asked for {len(back)} rows of logits, it gives {ours.shape[0]}")
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))
