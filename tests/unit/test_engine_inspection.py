"""What models pass to attention: known, harmless, or refused, whatever their configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from shared.engine.codecs.base import LayerShape
from shared.engine.engine import Engine
from shared.engine.inspection import Inspection, MaskFunction
from shared.errors import ModelError
from tests import tiny_models

CONTEXT = 100_000


def attended(
    mask: MaskFunction = causal_mask_function, heads: tuple[int, int] = (4, 2), keys: int = 2, **arguments: Any
) -> Inspection:
    """What is known after layer 3 has attended, over 2 tokens."""
    found = Inspection(CONTEXT)
    query, key, value = (
        torch.zeros(1, heads[0], 2, 8),
        torch.zeros(1, heads[1], keys, 8),
        torch.zeros(1, heads[1], 2, 6),
    )
    found.call(3, query, key, value, found.mask(mask, "cpu"), arguments)
    return found


def test_shapes_are_those_handed_over() -> None:
    assert attended().shapes == {3: LayerShape(2, 8, 6)}


@pytest.mark.parametrize(
    "arguments",
    [
        {"scaling": 0.5, "softcap": 30.0, "s_aux": torch.ones(4), "dropout": 0.0},
        {"position_ids": torch.arange(2), "is_causal": True, "output_attentions": False, "cu_seq_lens_q": None},
        {"sliding_window": None, "some_flag": False, "some_number": 0},
    ],
)
def test_what_is_known_or_says_nothing_is_let_through(arguments: dict[str, Any]) -> None:
    attended(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"position_bias": torch.zeros(1, 4, 2, 2)},
        {"indices": torch.zeros(1, 2, 2, dtype=torch.int64)},
        {"is_causal": False},
        {"dropout": 0.1},
        {"alibi": True},
        {"temperature": 0.7},
    ],
)
def test_any_other_argument_is_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"layer 3 passes {next(iter(arguments))} to attention"):
        attended(**arguments)


@pytest.mark.parametrize("window", [1, 2, 20, 4096, CONTEXT - 1, CONTEXT + 1])
def test_the_mask_must_be_that_of_the_window_passed(window: int) -> None:
    attended(sliding_window_causal_mask_function(window), sliding_window=window)
    with pytest.raises(ModelError, match="attention is not told so"):
        attended(sliding_window_causal_mask_function(window + 1), sliding_window=window if window < CONTEXT else 20)
    if window < CONTEXT:
        with pytest.raises(ModelError, match=r"position \d+ does not see"):
            attended(sliding_window_causal_mask_function(window))
        with pytest.raises(ModelError, match=r"position \d+ sees"):
            attended(sliding_window=window)


def test_other_patterns_are_refused_however_far_away_they_show() -> None:
    with pytest.raises(ModelError, match="position 8192 does not see"):
        attended(chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)))
    with pytest.raises(ModelError, match="position 0 sees 1"):
        attended(lambda batch, head, query, key: query >= 0)


def test_masks_that_are_not_asked_for_are_refused() -> None:
    found, tensor = Inspection(CONTEXT), torch.zeros(1, 4, 2, 8)
    for mask, reason in ((torch.zeros(1, 1, 2, 2), "of its own making"), (None, "no mask")):
        found.shapes.clear()
        with pytest.raises(ModelError, match=reason):
            found.call(0, tensor, tensor, tensor, mask, {})


def test_shapes_that_cannot_be_paged_are_refused() -> None:
    with pytest.raises(ModelError, match="7 query heads do not divide into 2 KV heads"):
        attended(heads=(7, 2))
    with pytest.raises(ModelError, match="attends to 5 keys where 2 tokens are given"):
        attended(keys=5)
    found, tensor = attended(), torch.zeros(1, 4, 2, 8)
    with pytest.raises(ModelError, match="layer 3 attends twice"):
        found.call(3, tensor, tensor, tensor, found.mask(causal_mask_function, "cpu"), {})


def test_an_argument_that_a_layer_passes_on_is_seen_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LlamaAttention.forward
    monkeypatch.setattr(
        LlamaAttention, "forward", lambda self, *args, **named: real(self, *args, **named, position_bias=torch.ones(1))
    )
    tiny_models.write(tmp_path, tiny_models.ARCHITECTURES["llama"])
    with pytest.raises(ModelError, match="llama: layer 0 passes position_bias to attention"):
        Engine.load(tmp_path, kv_blocks=1)


def test_tokens_mixed_outside_attention_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token shift is causal, and by itself the model runs as well with our attention as with its own."""
    real = LlamaAttention.forward

    def shifted(self, hidden_states, *args, **named):
        return real(self, hidden_states + 0.1 * hidden_states.roll(1, dims=1), *args, **named)

    monkeypatch.setattr(LlamaAttention, "forward", shifted)
    tiny_models.write(tmp_path, tiny_models.ARCHITECTURES["llama"])
    with pytest.raises(ModelError, match="other logits"):
        Engine.load(tmp_path, kv_blocks=1)


PROBED = {
    "longrope": "other logits",
    "llama4": "attention is not told so",
    "bidirectional": "sees",
    "not-causal": "is_causal",
    "lfm2-convolutions": "of 3 layers 1 use the attention interface",
    "bamba": "of 3 layers 1 use the attention interface",
    "sparse-attention": "minimax_m3_vl_text",
}


@pytest.mark.parametrize("name", PROBED)
def test_the_probe_finds_what_a_configuration_might_not_tell(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.engine.model.refuse_inexact", lambda config, text: None)
    tiny_models.write(tmp_path, tiny_models.REFUSED[name][0])
    with pytest.raises(ModelError, match=PROBED[name]):
        Engine.load(tmp_path, kv_blocks=1)
