"""Fuzz target of weights: safetensors files, and draft heads with their configuration."""

from __future__ import annotations

import contextlib
import json
import os
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save

from shared.engine import draft_release
from shared.engine.fingerprint import tensor_digests, vocabulary_digest
from shared.errors import ModelError
from tests.fuzz.files import folder, readable

BETWEEN = b"\0\0CONFIG ENDS\0\0"


@cache
def _model() -> Path:
    os.environ["TRINE_CACHE_DIR"] = str(folder() / "cache")  # of digests
    path = folder() / "model"
    path.mkdir()
    return path


def _release() -> dict[str, object]:
    """About the smallest head that there is."""
    target = {"name": "t", "fingerprint": "f", "vocabulary": "v"}
    return {
        "kind": "draft_head", "format": 1, "target": target, "hidden_size": 1, "window": 1, "width": 1,
        "proposable": 1, "vocab_size": 2, "rms_norm_eps": 1e-5,
    }  # fmt: skip


def seeds_of_weights() -> list[bytes]:
    kinds = {"I8": torch.int8, "F32": torch.float32, "I32": torch.int32}
    shapes = draft_release.Release.model_validate(_release()).shapes()
    found = {name: torch.ones(shape, dtype=kinds[kind]) for name, (kind, shape) in shapes.items()}
    table = {"model.embed_tokens.weight": torch.ones(2, 1)}
    config = json.dumps(_release()).encode()
    return [config + BETWEEN + save(found), config + BETWEEN + save(table), b'{"model":{"vocab":{"a":0}}}' + BETWEEN]


def check_weights(data: bytes) -> None:
    """A config.json (also taken for a tokenizer.json), and after it a model.safetensors."""
    about, _, weights = data.partition(BETWEEN)
    here = _model()
    for name, content in (("config.json", about), ("tokenizer.json", about), ("model.safetensors", weights)):
        (here / name).write_bytes(content)
    digests: list[str] | None = None
    with contextlib.suppress(ModelError):
        vocabulary_digest(here)
    with contextlib.suppress(ModelError):
        digests = tensor_digests(here / "model.safetensors")
    try:
        release = draft_release.about(here)
    except ModelError as error:
        readable(error)
        return
    with contextlib.suppress(ModelError):
        found = draft_release.tensors(here, release)
        assert digests is not None and len(digests) == len(found), "a head whose weights have no digest"
    with contextlib.suppress(ModelError):
        assert draft_release.embedding(here, release).shape[1] == release.hidden_size
