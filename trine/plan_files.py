"""A model's shape from its files: a folder with config.json, or a GGUF file. No torch.

Keys of configurations are those of transformers, keys of GGUF files those of llama.cpp. A model with latent attention
(DeepSeek's) is served with its keys and values expanded, so those are what its KV holds.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ModelError
from trine.plan_model import ModelShape

MAX_CONFIG = 16 << 20
MAX_HEADER = 100 << 20
MOST = 1 << 20
"""Of layers, heads and numbers in a key: more than any model has."""
_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_UNSOUND = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error,
)  # fmt: skip
"""What reading files of somebody's making raises, one way or another."""


def shape_of(model: Path) -> ModelShape:
    """Of a folder or a GGUF file. Raises ModelError."""
    if not model.exists():
        raise ModelError(f"there is no folder or GGUF file {str(model)!r:.200}")
    try:
        return _sound(_of_gguf(model) if model.suffix == ".gguf" else _of_folder(model))
    except _UNSOUND as error:
        raise ModelError(f"{model} says too little of its shape: {type(error).__name__}: {error!s:.200}") from None


def _sound(shape: ModelShape) -> ModelShape:
    numbers = (shape.layers, shape.heads, shape.kv_heads, shape.k_dim, shape.v_dim)
    if not all(0 < number <= MOST for number in numbers):
        raise ValueError(f"layers, heads, KV heads, sizes of keys and values: {numbers}")
    if not 0 < shape.active <= shape.params < math.inf:
        raise ValueError(f"{shape.active:g} of {shape.params:g} weights for a token")
    return shape


def _of_folder(folder: Path) -> ModelShape:
    config = _json(folder / "config.json", MAX_CONFIG)
    config = {**config, **(config.get("text_config") or {})}
    attention, experts = _Attention.of(config), _Experts.of(config)
    params, idle = _stored(folder), 0.0
    if not params or experts.count:
        estimated = _estimated(config, attention, experts)
        params = params or estimated
        # Files may pack weights, or have more of them than are used: what rests is a share of them.
        idle = params * experts.idle / estimated
    dtype = _DTYPES.get(config.get("dtype") or config.get("torch_dtype") or "float32", 2)
    return ModelShape(
        name=folder.name,
        layers=int(config["num_hidden_layers"]),
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        k_dim=attention.k_dim,
        v_dim=attention.v_dim,
        params=params,
        active=params - idle,
        dtype_bytes=dtype,
        kv_dtype_bytes=dtype,
    )


@dataclass(frozen=True, slots=True)
class _Attention:
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    weights: float
    """Of one layer."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Attention:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        if config.get("kv_lora_rank"):
            return cls._latent(config, hidden, heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        k_dim = int(config.get("head_dim") or hidden // heads)
        v_dim = int(config.get("v_head_dim") or k_dim)
        return cls(heads, kv_heads, k_dim, v_dim, float(hidden) * (heads + kv_heads) * (k_dim + v_dim))

    @classmethod
    def _latent(cls, config: Mapping[str, Any], hidden: int, heads: int) -> _Attention:
        """DeepSeek-V2 (arXiv 2405.04434, 2.1): keys and values of all heads come from one short vector."""
        rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        nope, v_dim = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
        queries = int(config.get("q_lora_rank") or 0)
        k_dim = nope + rope
        asking = queries * (hidden + heads * k_dim) if queries else hidden * heads * k_dim
        keeping = hidden * (rank + rope) + rank * heads * (nope + v_dim)
        return cls(heads, heads, k_dim, v_dim, float(asking + keeping + heads * v_dim * hidden))


@dataclass(frozen=True, slots=True)
class _Experts:
    """`layers` of them have `count` experts of `weights` each, `used` for a token, and `shared` weights for all."""

    count: int
    used: int
    layers: int
    weights: float
    shared: float

    @property
    def idle(self) -> float:
        """Weights that a token is not multiplied with."""
        return self.layers * max(self.count - self.used, 0) * self.weights

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Experts:
        count = next((int(config[key]) for key in _EXPERTS if config.get(key)), 0)
        if not count:
            for key, value in config.items():
                if "num_experts" in key and "per_tok" not in key and type(value) is int and value > 1:
                    raise ValueError(f"{key} is not known here; give --params and --active instead")
            return cls(0, 0, 0, 0.0, 0.0)
        hidden, layers = float(config["hidden_size"]), int(config["num_hidden_layers"])
        dense = int(config.get("first_k_dense_replace") or 0) + len(config.get("mlp_only_layers") or ())
        width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
        beside = int(config.get("n_shared_experts") or config.get("num_shared_experts") or 0) * width
        beside += int(config.get("shared_expert_intermediate_size") or 0)
        used = int(config.get("num_experts_per_tok") or config.get("experts_per_token") or count)
        # A gated MLP has three matrices; a router has one row for each expert.
        return cls(count, used, max(layers - dense, 0), 3 * hidden * width, hidden * (3 * beside + count))


def _estimated(config: Mapping[str, Any], attention: _Attention, experts: _Experts) -> float:
    """Weights of a decoder with gated MLPs, as most are now."""
    hidden, layers = float(config["hidden_size"]), int(config["num_hidden_layers"])
    mixed = experts.layers * (experts.count * experts.weights + experts.shared)
    dense = layers - experts.layers
    mlp = 3 * hidden * int(config["intermediate_size"]) if dense else 0.0
    embeddings = int(config["vocab_size"]) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return layers * attention.weights + dense * mlp + mixed + embeddings


def _json(path: Path, most: int) -> dict[str, Any]:
    if path.stat().st_size > most:
        raise ValueError(f"{path.name} has more than {most} bytes")
    return _object(path.read_bytes(), path.name)


def _object(data: bytes, name: str) -> dict[str, Any]:
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no object")
    return found


def _stored(folder: Path) -> float:
    """Weights in the folder's safetensors files, by their headers; 0 if there are none."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > min(MAX_HEADER, path.stat().st_size):
                raise ValueError(f"{path.name} has no header")
            header = _object(file.read(size), f"the header of {path.name}")
        total += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
    return float(total)


def _of_gguf(path: Path) -> ModelShape:
    """Weights are held as fp32, as a worker converts them (`shared/engine/gguf.py`)."""
    from gguf import GGUFReader

    from shared.engine import gguf_header

    gguf_header.check(path)
    reader = GGUFReader(str(path))

    def number(key: str) -> int:
        """0: it is not said."""
        field = reader.get_field(f"{kind.contents()}.{key}") if kind is not None else None
        return 0 if field is None else int(field.contents())

    kind = reader.get_field("general.architecture")
    heads = number("attention.head_count")
    # Of latent attention, `_mla` is what it expands to, and the other what llama.cpp caches of it.
    expanded = "_mla" if number("attention.key_length_mla") else ""
    k_dim = number(f"attention.key_length{expanded}") or number("embedding_length") // heads
    sizes = [(tensor.name, int(tensor.n_elements)) for tensor in reader.tensors]
    params = float(sum(size for _, size in sizes))
    mixed = float(sum(size for name, size in sizes if "_exps." in name))
    return ModelShape(
        name=path.stem,
        layers=number("block_count"),
        heads=heads,
        kv_heads=heads if number("attention.kv_lora_rank") else number("attention.head_count_kv") or heads,
        k_dim=k_dim,
        v_dim=number(f"attention.value_length{expanded}") or k_dim,
        params=params,
        active=params - _idle(mixed, number("expert_count"), number("expert_used_count")),
        dtype_bytes=4,
        kv_dtype_bytes=4,
    )


def _idle(mixed: float, count: int, used: int) -> float:
    """Of the weights of all experts, those that a token is not multiplied with."""
    if not count and not mixed:
        return 0.0
    if not mixed or not 0 < used <= count:
        raise ValueError(f"{used} of {count} experts for a token, and {mixed:g} weights of them")
    return mixed * (1 - used / count)
