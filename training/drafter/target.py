"""What a drafter takes from its target: the shape of its layers, some of them, and its embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shared.engine.fingerprint import fingerprint, read_json, vocabulary_digest, weight_files
from shared.errors import ConfigError, ModelError


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a drafter of the Llama architecture, named as in its config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    """Of the target: ids that the drafter reads."""


@dataclass(frozen=True, slots=True)
class Target:
    folder: Path
    name: str
    fingerprint: str
    """Of its weights in float32, by `shared.engine.fingerprint`."""
    vocabulary: str
    shape: Shape

    @classmethod
    def of(cls, folder: Path, name: str) -> Target:
        """Raises ModelError for a target whose layers a drafter cannot begin with."""
        return cls(
            folder, name, fingerprint(folder), vocabulary_digest(folder), _shape(read_json(folder / "config.json"))
        )

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Float32, on the CPU. Raises ModelError when one is missing."""
        found: dict[str, Tensor] = {}
        for path in weight_files(self.folder):
            with safe_open(path, "pt") as file:
                present = set(file.keys())
                found.update({name: file.get_tensor(name).float() for name in names if name in present})
        if missing := [name for name in names if name not in found]:
            raise ModelError(f"{self.folder} has no tensor {missing[0]}")
        return found

    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size]"""
        return self.tensors([_EMBEDDING])[_EMBEDDING]

    def head(self) -> Tensor:
        """[vocab_size, hidden_size]: rows of the LM head, which may be the embedding."""
        try:
            return self.tensors([_HEAD])[_HEAD]
        except ModelError:
            return self.embedding()

    def layers(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Weights of a drafter whose layers are these of the target, and of the final norm. Raises ConfigError."""
        depth = self.shape.num_hidden_layers
        if bad := [number for number in numbers if not 0 <= number < depth]:
            raise ConfigError(f"the target has no layer {bad[0]}, only 0 to {depth - 1}", field="layers")
        names = {
            f"layers.{i}.{part}.weight": f"model.layers.{number}.{part}.weight"
            for i, number in enumerate(numbers)
            for part in PARTS
        } | {"norm.weight": "model.norm.weight"}
        tensors = self.tensors(sorted(set(names.values())))
        return {ours: tensors[theirs].clone() for ours, theirs in names.items()}


PARTS = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
"""Of a layer."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _shape(config: dict[str, Any]) -> Shape:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads = config.get("num_attention_heads")
    if config.get("model_type") != "llama" or config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"a drafter is a small Llama; the target is of type {config.get('model_type')!r}")
    if config.get("attention_bias") or config.get("mlp_bias") or rope.get("rope_type", "default") != "default":
        raise ModelError("a drafter has neither biases nor scaled rotary positions, and the target has")
    try:
        return Shape(
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_hidden_layers=int(config["num_hidden_layers"]),
            num_attention_heads=int(config["num_attention_heads"]),
            num_key_value_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // int(heads or 1)),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            vocab_size=int(config["vocab_size"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the target's config.json cannot be used: {error}") from None


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
