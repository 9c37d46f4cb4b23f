"""Conversations with what the target thought at each position of its answers, as safetensors files.

The distribution after token `i` of a shard is that over its token `i + 1`. Kept of it are the `k` most likely tokens
and the logarithms of their probabilities at temperature 1, over the whole vocabulary: what they leave to 1 is the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from shared.errors import ConfigError
from training.drafter.files import put

_DTYPES = {"tokens": "i4", "begins": "i4", "scored": "i4", "first": "i4", "top_ids": "i4", "top_logp": "f2"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """One sequence. `scored` [r] ascends: positions whose next token's distribution is known."""

    tokens: np.ndarray
    """int32 [n]"""
    scored: np.ndarray
    """int32 [r]"""
    top_ids: np.ndarray
    """int32 [r, k], most likely first"""
    top_logp: np.ndarray
    """float16 [r, k]"""


@dataclass(frozen=True, slots=True)
class Shard:
    """Conversations one after the other: number `c` has tokens `begins[c]:begins[c+1]`, rows `first[c]:first[c+1]`.

    `scored` counts from the beginning of its conversation.
    """

    tokens: np.ndarray
    begins: np.ndarray
    scored: np.ndarray
    first: np.ndarray
    top_ids: np.ndarray
    top_logp: np.ndarray

    @classmethod
    def of(cls, conversations: Sequence[Conversation]) -> Shard:
        parts = {f.name: [getattr(c, f.name) for c in conversations] for f in fields(Conversation)}
        joined = {name: np.concatenate(arrays).astype(_DTYPES[name]) for name, arrays in parts.items()}
        return cls(begins=_begins(parts["tokens"]), first=_begins(parts["scored"]), **joined)

    def conversations(self) -> list[Conversation]:
        """Views, nothing is copied."""
        rows = list(zip(self.begins[:-1], self.begins[1:], self.first[:-1], self.first[1:], strict=True))
        return [
            Conversation(self.tokens[a:b], self.scored[c:d], self.top_ids[c:d], self.top_logp[c:d])
            for a, b, c, d in rows
        ]


def write(path: Path, shard: Shard) -> None:
    put(path, lambda part: save_file({name: getattr(shard, name) for name in _DTYPES}, part))


def read(path: Path) -> Shard:
    """Raises ConfigError for a file that is not a shard."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if {name: tensor.dtype.str[1:] for name, tensor in tensors.items()} != _DTYPES:
        raise ConfigError(f"{path} is not a shard of conversations")
    return Shard(**tensors)


def _begins(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum([0, *map(len, arrays)]).astype(np.int32)
