"""What a draft head takes from its target: sizes, embeddings and LM head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shared.engine.fingerprint import fingerprint, read_json, vocabulary_digest, weight_files
from shared.errors import ModelError

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Target:
    folder: Path
    name: str
    fingerprint: str
    """Of its weights in float32, by `shared.engine.fingerprint`."""
    vocabulary: str
    """Digest of which token has which id."""
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float

    @classmethod
    def of(cls, folder: Path, name: str) -> Target:
        """Raises ModelError for a target whose config.json lacks one of the sizes."""
        config = read_json(folder / "config.json")
        return cls(
            folder,
            name,
            fingerprint(folder),
            vocabulary_digest(folder),
            int(_number(config, "hidden_size")),
            int(_number(config, "vocab_size")),
            _number(config, "rms_norm_eps"),
        )

    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size], float32. Raises ModelError when there is none under its usual name."""
        if (found := self._tensor(_EMBEDDING)) is None:
            raise ModelError(f"{self.folder} has no tensor {_EMBEDDING}")
        return found

    def head(self) -> Tensor:
        """[vocab_size, hidden_size], float32: rows of the LM head, which may be the embedding."""
        found = self._tensor(_HEAD)
        return self.embedding() if found is None else found

    def _tensor(self, name: str) -> Tensor | None:
        for path in weight_files(self.folder):
            with safe_open(path, "pt") as file:
                if name in set(file.keys()):
                    tensor: Tensor = file.get_tensor(name).float()
                    return tensor
        return None


def _number(config: dict[str, Any], name: str) -> float:
    value = config.get(name)
    if not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"the target's config.json has no usable {name}: a draft head needs it")
    return float(value)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
