"""A draft head as it is released: int8 weights with a scale per row, and a config.json that says what they belong to.

model.safetensors has for each matrix `<name>` [rows, columns] in int8 and `<name>.scale` [rows] in float32, the weight
being their product; vectors in float32; and `vocabulary` [proposable] in int32, the target's id of each row of the
head. The embeddings are the target's own and are read from its weights. What the names mean: `model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.engine import draft_release
from shared.errors import ModelError
from training.drafter.files import put, put_json
from training.drafter.model import DraftHead
from training.drafter.target import Target
from training.drafter.vocabulary import Vocabulary

KIND, FORMAT = "draft_head", 1
_LEVELS = 127


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, columns] and float32 scales [rows]: no element is off by more than half its row's scale."""
    scale = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * _LEVELS) / _LEVELS
    return (weight / scale[:, None]).round().clamp(-_LEVELS, _LEVELS).to(torch.int8), scale


def write(folder: Path, head: DraftHead, tokens: int) -> None:
    """`tokens`: positions of answers that it was trained on."""
    stored = {"vocabulary": torch.from_numpy(head.vocabulary.target_ids)}
    for name, weight in head.tensors().items():
        if weight.dim() == 1:
            stored[name] = weight
        else:
            stored[name], stored[f"{name}.scale"] = quantised(weight)
    put(folder, lambda part: _fill(part, stored, config(head, tokens)))


def config(head: DraftHead, tokens: int) -> dict[str, Any]:
    """What a loader needs to know, and must check."""
    target = head.target
    return {
        "kind": KIND,
        "format": FORMAT,
        "target": {"name": target.name, "fingerprint": target.fingerprint, "vocabulary": target.vocabulary},
        "hidden_size": target.hidden_size,
        "window": head.window,
        "width": head.width,
        "proposable": len(head.vocabulary),
        "vocab_size": target.vocab_size,
        "rms_norm_eps": target.rms_norm_eps,
        "tokens_trained": tokens,
    }


def read(folder: Path, target: Target) -> DraftHead:
    """A released head for `target`. Raises ModelError when it is for another one, or damaged."""
    about = draft_release.about(folder)
    if about.target.fingerprint != target.fingerprint:
        made_for = f"{about.target.name} ({about.target.fingerprint:.12})"
        raise ModelError(f"the draft head is for {made_for}, not {target.name}")
    stored = draft_release.tensors(folder, about)
    vocabulary = Vocabulary(stored["vocabulary"].numpy(), target.vocab_size)
    head = DraftHead(target, vocabulary, about.window, about.width)
    scales = {name: stored.pop(f"{name}.scale") for name in list(stored) if f"{name}.scale" in stored}
    head.load({name: tensor * scales[name][:, None] if name in scales else tensor for name, tensor in stored.items()})
    return head


def size(folder: Path) -> int:
    """Bytes of the weights."""
    return (folder / "model.safetensors").stat().st_size


def _fill(folder: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    folder.mkdir()
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # to be handed on; safetensors writes for the owner alone
    put_json(folder / "config.json", about)
