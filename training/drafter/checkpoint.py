"""All that training goes on from, in one safetensors file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shared.errors import ConfigError
from training.drafter.files import put
from training.drafter.vocabulary import Vocabulary


@dataclass
class Progress:
    step: int = 0
    """Steps of the optimiser that are done."""
    losses: list[float] = field(default_factory=list)
    """Since the last entry of `history`."""
    history: list[dict[str, float]] = field(default_factory=list)


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW, one of each per parameter."""


def save(
    path: Path, model: nn.Module, vocabulary: Vocabulary, optimiser: torch.optim.Optimizer, progress: Progress
) -> None:
    tensors: dict[str, Tensor] = {"vocabulary": torch.from_numpy(vocabulary.target_ids)}
    tensors |= {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for moment in MOMENTS if parameter in optimiser.state else ():
            tensors[f"{moment}.{name}"] = optimiser.state[parameter][moment]
    put(path, lambda part: save_file(tensors, part, {"progress": json.dumps(vars(progress))}))


def progress_of(path: Path) -> Progress:
    """Raises ConfigError for a file that is not a checkpoint."""
    try:
        with safe_open(path, "pt") as file:
            return Progress(**json.loads((file.metadata() or {})["progress"]))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a checkpoint: {error}") from None


def vocabulary_of(path: Path, target_size: int) -> Vocabulary:
    with safe_open(path, "np") as file:
        ids: np.ndarray = file.get_tensor("vocabulary")
    return Vocabulary(ids, target_size)


def load_model(path: Path, model: nn.Module) -> None:
    """The weights alone."""
    with safe_open(path, "pt") as file:
        model.load_state_dict({name: file.get_tensor(f"model.{name}") for name in model.state_dict()})


def load(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> Progress:
    """Into a model and an optimiser that has not made a step yet."""
    progress = progress_of(path)
    load_model(path, model)
    with safe_open(path, "pt") as file:
        for name, parameter in model.named_parameters():
            if not (progress.step and parameter.requires_grad):
                continue
            moments = {moment: file.get_tensor(f"{moment}.{name}").to(parameter.device) for moment in MOMENTS}
            step = torch.tensor(float(progress.step), device=parameter.device)
            optimiser.state[parameter] = {"step": step, **moments}
    return progress
