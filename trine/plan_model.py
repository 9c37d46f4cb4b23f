"""What a plan has to know of a model: how much it weighs, and how large its KV is. No torch.

From a folder with config.json, from a GGUF file's header, or from numbers.
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

BLOCK_SIZE = 16
CODECS = ("none", "int8", "fp8_e4m3", "int4")
_ALIGN = 16
_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
MAX_CONFIG = 16 << 20
MAX_HEADER = 100 << 20


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`params`: all weights; `active`: those that a token is multiplied with (fewer in a mixture of experts)."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    params: float
    active: float
    dtype_bytes: int = 2
    """Of a weight, and of a number in KV without a codec."""

    @property
    def weight_bytes(self) -> float:
        return self.params * self.dtype_bytes

    @property
    def active_bytes(self) -> float:
        return self.active * self.dtype_bytes

    def kv_bytes(self, codec: str = "none", block_size: int = BLOCK_SIZE) -> float:
        """Bytes of KV of one token: a block's, by the layouts of `shared/engine/codecs`, over its tokens."""
        rows, numbers = block_size * self.kv_heads, block_size * self.kv_heads * self.head_dim
        if codec == "none":
            fields = [numbers * self.dtype_bytes] * 2
        elif codec in ("int8", "fp8_e4m3"):
            fields = [numbers, numbers, rows * 4, rows * 4]
        else:
            half, groups = -(-self.head_dim // 2), -(-self.head_dim // 32)
            channels = self.kv_heads * self.head_dim
            fields = [rows * half, rows * half, channels * 2, channels, self.kv_heads * 4]
            fields += [rows * groups, rows * -(-groups // 2)]
        return self.layers * sum(-(-field // _ALIGN) * _ALIGN for field in fields) / block_size

    def flops(self, context: float) -> float:
        """Of one token behind `context` others: two for each weight, and four for each number that attention reads."""
        return 2 * self.active + 4 * self.layers * self.heads * self.head_dim * context


def shape_of(model: Path) -> ModelShape:
    """Of a folder or a GGUF file. Raises ModelError."""
    if not model.exists():
        raise ModelError(f"there is no folder or GGUF file {str(model)!r:.200}")
    try:
        return _of_gguf(model) if model.suffix == ".gguf" else _of_folder(model)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelError(f"{model} says too little of its shape: {type(error).__name__}: {error}") from None


def _of_folder(folder: Path) -> ModelShape:
    config = _json(folder / "config.json", MAX_CONFIG)
    config = {**config, **(config.get("text_config") or {})}
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    dtype = _DTYPES.get(config.get("dtype") or config.get("torch_dtype") or "float32", 2)
    params = _stored(folder) or _estimated(config, heads, head_dim)
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    used = int(config.get("num_experts_per_tok") or experts)
    idle = _expert(config) * max(experts - used, 0) if experts else 0.0
    return ModelShape(
        name=folder.name,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        params=params,
        active=max(params - idle, params * 0.01),
        dtype_bytes=dtype,
    )


def _json(path: Path, most: int) -> dict[str, Any]:
    if path.stat().st_size > most:
        raise ValueError(f"{path.name} has more than {most} bytes")
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no object")
    return found


def _stored(folder: Path) -> float:
    """Weights in the folder's safetensors files, by their headers; 0 if there are none."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > min(MAX_HEADER, path.stat().st_size):
                raise ValueError(f"{path.name} has no header")
            header = json.loads(file.read(size))
        total += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
    return float(total)


def _estimated(config: Mapping[str, Any], heads: int, head_dim: int) -> float:
    """Of a decoder with gated MLPs, as most are now: for folders without weights."""
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * int(config["intermediate_size"])
    embeddings = int(config["vocab_size"]) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return layers * attention + (_expert(config) * experts if experts else layers * mlp) + embeddings


def _expert(config: Mapping[str, Any]) -> float:
    """Weights of one expert, in all layers together."""
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    return 3.0 * int(config["hidden_size"]) * width * int(config["num_hidden_layers"])


def _of_gguf(path: Path) -> ModelShape:
    """Weights are held as fp32, as a worker converts them (`shared/engine/gguf.py`)."""
    from gguf import GGUFReader

    from shared.engine import gguf_header

    gguf_header.check(path)
    reader = GGUFReader(str(path))

    def said(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise KeyError(key)
        return field.contents()

    kind = said("general.architecture")
    heads = int(said(f"{kind}.attention.head_count"))
    try:
        head_dim = int(said(f"{kind}.attention.key_length"))
    except KeyError:
        head_dim = int(said(f"{kind}.embedding_length")) // heads
    try:
        kv_heads = int(said(f"{kind}.attention.head_count_kv"))
    except KeyError:
        kv_heads = heads
    params = float(sum(int(tensor.n_elements) for tensor in reader.tensors))
    return ModelShape(path.stem, int(said(f"{kind}.block_count")), heads, kv_heads, head_dim, params, params, 4)
