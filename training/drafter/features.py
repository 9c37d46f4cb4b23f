"""The target's hidden states at the positions of its answers, in a file beside each shard.

Row i of a file is what the target's LM head reads at the position of row i of the shard: after the final norm, float16
[rows, hidden_size]. The conversations are read again for it, whole, which costs less than a tenth of writing them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from shared.errors import ConfigError, ModelError
from training.drafter.files import put
from training.drafter.shards import Conversation
from training.drafter.target import Target, device

_NAME = "hidden"
_BATCH_TOKENS = 2048


class Reader:
    """The target, without its LM head."""

    def __init__(self, target: Target) -> None:
        self._device = device()
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        module: Any = AutoModelForCausalLM.from_pretrained(target.folder, dtype=dtype)
        self._body: Any = module.base_model.to(self._device).eval()
        self._size = target.hidden_size

    @torch.inference_mode()
    def hidden(self, talks: Sequence[Conversation]) -> np.ndarray:
        """float16 [rows of all `talks`, hidden_size]. Raises ModelError when it is not finite in float16."""
        cuts = np.cumsum([0, *(len(talk.scored) for talk in talks)])
        result = np.zeros((cuts[-1], self._size), np.float16)
        for members in batches([len(talk.tokens) for talk in talks], _BATCH_TOKENS):
            lines = torch.zeros(len(members), max(len(talks[i].tokens) for i in members), dtype=torch.long)
            for line, i in zip(lines, members, strict=True):
                line[: len(talks[i].tokens)] = torch.from_numpy(talks[i].tokens)
            # Causal attention never looks at what stands to the right, so the padding there needs no mask.
            states = self._body(lines.to(self._device), use_cache=False).last_hidden_state
            for state, i in zip(states, members, strict=True):
                rows = torch.from_numpy(talks[i].scored).long().to(self._device)
                result[cuts[i] : cuts[i + 1]] = state[rows].half().cpu().numpy()
        if not np.isfinite(result).all():
            raise ModelError("the target's hidden states are not finite in float16")
        return result


def batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Indices, longest first, in groups that fill at most `tokens` when all get the length of their first."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > tokens:
            groups.append([])
        groups[-1].append(i)
    return groups


def write(path: Path, hidden: np.ndarray) -> None:
    put(path, lambda part: save_file({_NAME: hidden}, part))


def mapped(path: Path, rows: int, size: int) -> np.ndarray:
    """The states in a file, float16 [rows, size], in the file's own memory. Raises ConfigError for other files."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(min(length, 4096)))[_NAME]
        if entry["dtype"] != "F16" or entry["shape"] != [rows, size]:
            raise ConfigError(f"{path} has {entry['dtype']} {entry['shape']}, not F16 {[rows, size]}")
        return np.memmap(path, np.float16, "r", 8 + length + entry["data_offsets"][0], (rows, size))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
