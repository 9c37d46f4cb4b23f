"""A decoder-only transformers model, loaded so that its attention layers call ours; or refused, with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from shared.engine.attention import NAME, Features, attend, attending
from shared.engine.batch import Tile
from shared.engine.fingerprint import read_json
from shared.engine.linear import arrange
from shared.engine.pool import LayerShape
from shared.errors import ModelError

_PROBE_TOKENS = 3
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference of logits from the model's own attention, relative to the largest logit."""

# Rotary scalings whose factor depends on the longest position in the batch: a key's bytes would depend on who else
# was in it, or on how far the sequence went later.
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})


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
        _refuse_inexact(config, text)
        _truncate(text, layers)
        module: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=NAME, local_files_only=True, use_safetensors=True
        )
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        raise ModelError(f"{folder} cannot be loaded: {error}") from error
    module = module.to(device).eval().requires_grad_(False)
    shapes = _probe(module, text.num_hidden_layers, dtype, device)
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


def _refuse_inexact(config: Any, text: Any) -> None:
    kind = text.model_type
    if config.is_encoder_decoder:
        raise ModelError(f"{kind} is an encoder-decoder model; only decoder-only models are served")
    rope = {scaling for scaling in _rope_types(getattr(text, "rope_parameters", None)) if scaling in _ROPE_BY_LENGTH}
    if rope:
        raise ModelError(f"{kind} uses {rope.pop()} rope scaling: its keys depend on the longest sequence in the batch")
    if getattr(text, "attention_chunk_size", None):
        raise ModelError(f"{kind} attends in chunks, which do not reach the attention function")
    if getattr(text, "use_bidirectional_attention", None):
        raise ModelError(f"{kind} attends in both directions; only causal models are served")
    if not getattr(text, "max_position_embeddings", None):
        raise ModelError(f"{kind} does not say how long its context is (max_position_embeddings)")


def _rope_types(parameters: Any) -> Iterator[str]:
    """Rope types in `rope_parameters`, which some models have once and some per kind of layer."""
    if isinstance(parameters, Mapping):
        if isinstance(kind := parameters.get("rope_type"), str):
            yield kind
        for value in parameters.values():
            yield from _rope_types(value)


def _truncate(text: Any, layers: int | None) -> None:
    if layers is None:
        return
    if not 0 < layers <= text.num_hidden_layers:
        raise ModelError(f"{layers} layers asked for; the model has {text.num_hidden_layers}")
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]


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


def _probe(module: Any, layers: int, dtype: torch.dtype, device: torch.device) -> tuple[LayerShape, ...]:
    """The shapes that the layers really hand over, from a pass over three tokens; compared with the model's own."""
    probe = _Probe()
    kind = module.config.get_text_config().model_type
    tokens = torch.arange(1, 1 + _PROBE_TOKENS, device=device)[None]  # distinct, or attention would not matter
    try:
        with torch.inference_mode(), attending(probe):
            ours = module(input_ids=tokens, use_cache=False).logits
            module.set_attn_implementation("eager")
            theirs = module(input_ids=tokens, use_cache=False).logits
            module.set_attn_implementation(NAME)
    except (AttributeError, RuntimeError, TypeError, ValueError, LookupError) as error:
        raise ModelError(f"{kind} cannot be run over paged KV: {error}") from error
    if sorted(probe.shapes) != list(range(layers)):
        raise ModelError(
            f"{kind} has {layers} layers of which {len(probe.shapes)} use the attention interface: the state of the "
            "others would not be in the KV pool"
        )
    difference = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))
    if not difference <= _PROBE_TOLERANCE[dtype]:
        raise ModelError(f"{kind} attends in a way that is not passed on: logits differ by {difference:.2g}")
    return tuple(probe.shapes[i] for i in range(layers))


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
