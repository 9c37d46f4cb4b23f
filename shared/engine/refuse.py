"""Models that would load and answer wrongly, told by their configuration.

What a configuration does not tell, the probe finds (`shared.engine.probe`); this gives the reader a better reason, and
before any weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shared.errors import ModelError

# Rotary scalings whose factor depends on the longest position in the batch: a key's bytes would depend on who else
# was in it, or on how far the sequence went later.
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})

_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers, of those that configurations name, that keep all they know of the past in keys and values."""


def refuse_inexact(config: Any, text: Any) -> None:
    """Raises ModelError with the reason. `text` is the configuration of the decoder inside `config`."""
    for reason in _reasons(config, text):
        raise ModelError(f"{text.model_type} {reason}")


def _reasons(config: Any, text: Any) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "is an encoder-decoder model; only decoder-only models are served"
    for scaling in _rope_types(getattr(text, "rope_parameters", None)):
        if scaling in _ROPE_BY_LENGTH:
            yield f"uses {scaling} rope scaling: its keys depend on the longest sequence in the batch"
    if getattr(text, "attention_chunk_size", None) or "chunked_attention" in _layer_types(text):
        yield "attends in chunks, which do not reach the attention function"
    for kind in _layer_types(text):
        if kind not in _LAYERS:
            yield f"has {kind} layers; only those of full and sliding attention keep all they need in the KV pool"
    if getattr(text, "use_bidirectional_attention", None) in (True, "all") or not getattr(text, "is_causal", True):
        yield "attends in both directions; only causal models are served"
    if _alibi(text):
        yield "adds a bias to attention scores (ALiBi), which does not reach the attention function"
    heads, kv_heads = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
        yield f"has {heads} query heads, which do not divide into {kv_heads} KV heads"
    if not getattr(text, "max_position_embeddings", None):
        yield "does not say how long its context is (max_position_embeddings)"


def _rope_types(parameters: Any) -> Iterator[str]:
    """Rope types in `rope_parameters`, which some models have once and some per kind of layer."""
    if isinstance(parameters, Mapping):
        if isinstance(kind := parameters.get("rope_type"), str):
            yield kind
        for value in parameters.values():
            yield from _rope_types(value)


def _layer_types(text: Any) -> list[str]:
    kinds = getattr(text, "layer_types", None)
    return [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, list | tuple) else []


def _alibi(text: Any) -> bool:
    return text.model_type == "bloom" or any(
        getattr(part, "alibi", False) for part in (text, getattr(text, "attn_config", None))
    )
