"""A decoder-only transformers model, loaded so that its attention layers call ours; or refused, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from shared.engine.attention import NAME
from shared.engine.codecs.base import LayerShape
from shared.engine.fingerprint import read_json
from shared.engine.linear import arrange
from shared.engine.probe import probe
from shared.engine.refuse import refuse_inexact
from shared.errors import ModelError


@dataclass(frozen=True)
class Model:
    """A loaded model. `shapes` is what each of its layers stores per token."""

    module: Any
    shapes: tuple[LayerShape, ...]
    context_length: int
    vocab_size: int
    eos_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device

    def logits(self, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """One forward pass over a flat row of tokens: float32 logits [rows, vocab]. `attending` must be in force."""
        out = self.module(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)
        logits: Tensor = out.logits[0]
        return logits.float()


def load(folder: Path, layers: int | None = None) -> Model:
    """The model in `folder` in fp32 on the CPU, or in bf16 on a CUDA GPU; only its first `layers` layers if given.

    Raises ModelError for weights that cannot be read and for models that would not run exactly.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it lists layers left out on purpose
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        text = config.get_text_config()
        refuse_inexact(config, text)
        _truncate(text, layers)
        module: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=NAME, local_files_only=True, use_safetensors=True
        )
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        raise ModelError(f"{folder} cannot be loaded: {error}") from error
    module = module.to(device).eval().requires_grad_(False)
    shapes = probe(module, text.num_hidden_layers, dtype, device)
    if device.type == "cpu":
        arrange(module)
    return Model(
        module=module,
        shapes=shapes,
        context_length=int(text.max_position_embeddings),
        vocab_size=int(module.get_output_embeddings().weight.shape[0]),
        eos_ids=_eos_ids(folder),
        dtype=dtype,
        device=device,
    )


def _truncate(text: Any, layers: int | None) -> None:
    if layers is None:
        return
    if not 0 < layers <= text.num_hidden_layers:
        raise ModelError(f"{layers} layers asked for; the model has {text.num_hidden_layers}")
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]


def _eos_ids(folder: Path) -> frozenset[int]:
    """Ids that end a text, by the generation config, the model's config and the tokenizer together."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _optional(folder / name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    token = _optional(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = read_json(folder / "tokenizer.json").get("added_tokens") or []
    ids.update(entry["id"] for entry in added if entry["content"] == content)
    return frozenset(ids)


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
