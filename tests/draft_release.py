"""Draft heads made in tests: a release folder for a target, random or with weights of one's choice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.engine.fingerprint import fingerprint, read_json, vocabulary_digest
from tests import tiny_models
from tests.ruined_model import write_ascii_tokenizer

EPSILON = 1e-5


def write_target(folder: Path, *, vocab: int) -> Path:
    """A model with random weights that reads ASCII."""
    tiny_models.write(folder, {**tiny_models.ARCHITECTURES["llama"], "vocab_size": vocab})
    write_ascii_tokenizer(folder)
    return folder


def random_tensors(
    *, hidden: int, window: int, width: int, ids: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Of a release, quantised weights of a size that keeps numbers in range."""
    wide = hidden * (1 + window)
    shapes = {
        "skip": (hidden, wide), "gate": (width, wide), "up": (width, wide), "down": (hidden, width),
        "head": (len(ids), hidden),
    }  # fmt: skip
    found = {"vocabulary": ids.int(), "out.weight": 1 + 0.1 * torch.randn(hidden, generator=generator)}
    for index in range(1 + window):
        found[f"norms.{index}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    for name, (rows, columns) in shapes.items():
        found[f"{name}.weight"] = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
        found[f"{name}.weight.scale"] = (0.5 + torch.rand(rows, generator=generator)) / (64 * columns**0.5)
    return found


def about(target: Path, tensors: Mapping[str, Tensor], **other: Any) -> dict[str, Any]:
    """The config.json that belongs to `tensors`; `other` fields take the place of the right ones."""
    hidden, wide = tensors["skip.weight"].shape
    return {
        "kind": "draft_head",
        "format": 1,
        "target": {"name": "tiny", "fingerprint": fingerprint(target), "vocabulary": vocabulary_digest(target)},
        "hidden_size": hidden,
        "window": wide // hidden - 1,
        "width": len(tensors["gate.weight"]),
        "proposable": len(tensors["vocabulary"]),
        "vocab_size": read_json(target / "config.json")["vocab_size"],
        "rms_norm_eps": EPSILON,
        "tokens_trained": 0,
        **other,
    }


def write(folder: Path, target: Path, tensors: Mapping[str, Tensor], **other: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about(target, tensors, **other)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_perfect(target: Path, folder: Path, *, vocab: int, context: int = 256, **config: Any) -> None:
    """A target whose next token depends on the last one alone, and in `folder` the head that knows how. `config` is for
    the target's config.json.

    Attention and MLPs add nothing, so the hidden state is the last token's embedding after the final norm. The head's
    skip matrix passes that embedding on, and its last matrix is the target's, which 8 bits hold exactly.
    """
    generator = torch.Generator().manual_seed(2)
    llama = {**tiny_models.ARCHITECTURES["llama"], "vocab_size": vocab, "max_position_embeddings": context}
    tiny_models.write(target, {**llama, **config})
    write_ascii_tokenizer(target)
    weights = load_file(target / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    size = weights["lm_head.weight"].shape[1]
    levels = torch.randint(-127, 128, (vocab, size), generator=generator, dtype=torch.int8)
    weights["lm_head.weight"] = levels * 0.01
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    tensors = random_tensors(hidden=size, window=2, width=8, ids=torch.arange(vocab), generator=generator)
    tensors["down.weight"].zero_()
    skip = torch.zeros(size, 3 * size, dtype=torch.int8)
    skip[:, size : 2 * size] = 127 * torch.eye(size, dtype=torch.int8)
    tensors |= {"skip.weight": skip, "skip.weight.scale": torch.full((size,), 1 / 127)}
    tensors |= {"head.weight": levels, "head.weight.scale": torch.full((vocab,), 0.01)}
    tensors |= {"norms.1.weight": torch.ones(size), "out.weight": weights["model.norm.weight"]}
    write(folder, target, tensors)
