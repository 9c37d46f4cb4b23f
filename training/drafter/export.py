"""A drafter as it is released: int8 weights with a scale per row, and a config.json that says what they belong to.

model.safetensors has for each matrix `<name>` [rows, columns] in int8 and `<name>.scale` [rows] in float32, the weight
being their product; norms in float32; and `vocabulary` [proposable] in int32, the target's id of each row of the LM
head. The embeddings are the target's own and are read from its weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import ModelError
from training.drafter.files import put, put_json, read_object
from training.drafter.model import Drafter
from training.drafter.target import Target
from training.drafter.vocabulary import Vocabulary

FORMAT = "trine-drafter-1"
_LEVELS = 127


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, columns] and float32 scales [rows]: no element is off by more than half its row's scale."""
    scale = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * _LEVELS) / _LEVELS
    return (weight / scale[:, None]).round().clamp(-_LEVELS, _LEVELS).to(torch.int8), scale


def write(folder: Path, drafter: Drafter, target: Target, layers: tuple[int, ...]) -> None:
    """`layers`: those of the target that it began with."""
    tensors = {"vocabulary": torch.from_numpy(drafter.vocabulary.target_ids)}
    for name, parameter in drafter.named_parameters():
        weight = parameter.detach().float().cpu()
        if weight.dim() == 1:
            tensors[name] = weight
        else:
            tensors[name], tensors[f"{name}.scale"] = quantised(weight)
    put(folder, lambda part: _fill(part, tensors, config(drafter, target, layers)))


def config(drafter: Drafter, target: Target, layers: tuple[int, ...]) -> dict[str, Any]:
    """What a loader needs to know, and must check."""
    shape = target.shape
    return {
        "format": FORMAT,
        "model_type": "llama",
        "target": {"name": target.name, "fingerprint": target.fingerprint, "vocabulary": target.vocabulary},
        "began_with_layers": list(layers),
        "quantisation": {"weights": "int8", "scales": "row"},
        "draft_vocab_size": len(drafter.vocabulary),
        "vocab_size": shape.vocab_size,
        "num_hidden_layers": len(drafter.layers),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
    }


def read(folder: Path, target: Target) -> Drafter:
    """A released drafter for `target`. Raises ModelError when it is for another one, or damaged."""
    about = read_object(folder / "config.json")
    if about.get("format") != FORMAT:
        raise ModelError(f"{folder} is in format {about.get('format')!r}, not {FORMAT!r}")
    if (belongs := about["target"])["fingerprint"] != target.fingerprint:
        raise ModelError(f"the drafter is for {belongs['name']} ({belongs['fingerprint']:.12}), not {target.name}")
    try:
        tensors = load_file(folder / "model.safetensors")
        vocabulary = Vocabulary(tensors.pop("vocabulary").numpy(), target.shape.vocab_size)
        scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith(".scale")}
        weights = {
            name: tensor * scales[f"{name}.scale"][:, None] if tensor.dim() > 1 else tensor
            for name, tensor in tensors.items()
        }
        drafter = Drafter(target.shape, int(about["num_hidden_layers"]), vocabulary, target.embedding())
        drafter.load_state_dict(weights)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise ModelError(f"{folder} cannot be loaded: {error}") from None
    return drafter


def size(folder: Path) -> int:
    """Bytes of the weights."""
    return (folder / "model.safetensors").stat().st_size


def _fill(folder: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # to be handed on; safetensors writes for the owner alone
    put_json(folder / "config.json", about)
