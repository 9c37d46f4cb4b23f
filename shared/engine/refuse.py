"""Models that would load and answer wrongly, told by their configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shared.errors import ModelError

# Rotary scalings whose factor depends on the longest position in the batch: a key's bytes would depend on who else
# was in it, or on how far the sequence went later.
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})


def refuse_inexact(config: Any, text: Any) -> None:
    """Raises ModelError with the reason. `text` is the configuration of the decoder inside `config`."""
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
