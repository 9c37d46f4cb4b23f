"""A draft head as it is released: a folder with config.json and model.safetensors, checked before anything is believed.

Matrices are int8 with a float32 scale per row (`<name>.scale`), the weight being their product; norms are float32.
`vocabulary` has the target's id of each row of the head. The embedding table is the target's own and not in the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.engine.fingerprint import read_json, weight_files
from shared.errors import ModelError
from shared.messages import MAX_HIDDEN

MAX_WINDOW = 64
MAX_WIDTH = 65_536
MAX_VOCABULARY = 1 << 22
LARGEST = 1e6
"""Scales and the weights of norms are below that. Training gives none above some tens."""
_EMBEDDING = "embed_tokens.weight"

_About = ConfigDict(strict=True, frozen=True, extra="ignore")


class TargetOf(BaseModel):
    """The model that a head drafts for."""

    model_config = _About

    name: Annotated[str, Field(max_length=1024)]
    fingerprint: Annotated[str, Field(max_length=128)]
    """Of its weights in float32."""
    vocabulary: Annotated[str, Field(max_length=128)]
    """Digest of its tokenizer's vocabulary."""


class Release(BaseModel):
    """What config.json says. Other fields are for people."""

    model_config = _About

    kind: Literal["draft_head"]
    format: Literal[1]
    target: TargetOf
    hidden_size: Annotated[int, Field(ge=1, le=MAX_HIDDEN)]
    """Channels of the target's hidden state."""
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW)]
    """Tokens that it looks back."""
    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)]
    """Channels between its gates."""
    proposable: Annotated[int, Field(ge=1, le=MAX_VOCABULARY)]
    """Tokens that it can draft."""
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCABULARY)]
    """Of the target."""
    rms_norm_eps: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type, as safetensors names it, and shape of each tensor."""
        h, wide, m, v = self.hidden_size, self.hidden_size * (1 + self.window), self.width, self.proposable
        matrices = {"skip": (h, wide), "gate": (m, wide), "up": (m, wide), "down": (h, m), "head": (v, h)}
        found: dict[str, tuple[str, tuple[int, ...]]] = {"vocabulary": ("I32", (v,)), "out.weight": ("F32", (h,))}
        found |= {f"norms.{i}.weight": ("F32", (h,)) for i in range(1 + self.window)}
        for name, shape in matrices.items():
            found[f"{name}.weight"] = ("I8", shape)
            found[f"{name}.weight.scale"] = ("F32", shape[:1])
        return found


def about(folder: Path) -> Release:
    """Raises ModelError naming the field of config.json that is wrong."""
    path = folder / "config.json"
    try:
        return Release.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ModelError(f"{path}: {name}: {first['msg']}", field=name) from None


def tensors(folder: Path, release: Release) -> dict[str, Tensor]:
    """All of model.safetensors. Types and shapes are compared before anything is read.

    Raises ModelError naming the tensor that is wrong.
    """
    path, wanted = folder / "model.safetensors", release.shapes()
    try:
        with safe_open(path, framework="pt") as file:
            _compare(path, {name: file.get_slice(name) for name in file.keys()}, wanted)  # noqa: SIM118
            found = {name: file.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    for name, tensor in found.items():
        if tensor.is_floating_point() and not bool((tensor.abs() < LARGEST).all()):  # nor is NaN
            raise ModelError(f"{path}: {name} has numbers that are not below {LARGEST:,.0f}", field=name)
        if name.endswith(".scale") and not bool((tensor > 0).all()):
            raise ModelError(f"{path}: {name} has numbers that are not above 0", field=name)
    ids = found["vocabulary"]
    if int(ids.min()) < 0 or int(ids.max()) >= release.vocab_size or len(ids.unique()) < len(ids):
        reason = f"ids must differ and be below {release.vocab_size}"
        raise ModelError(f"{path}: vocabulary: {reason}", field="vocabulary")
    return found


def _compare(path: Path, there: Mapping[str, Any], wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    for name in sorted({*there, *wanted}):
        expected = wanted.get(name)
        if name not in there or expected is None:
            raise ModelError(f"{path}: {name} is {'missing' if expected else 'not part of a draft head'}", field=name)
        found = (there[name].get_dtype(), tuple(there[name].get_shape()))
        if found != expected:
            raise ModelError(f"{path}: {name} is {found}, not {expected}", field=name)


def embedding(target: Path, release: Release) -> Tensor:
    """The target's embedding table, [at least vocab_size, hidden_size], mapped from its file. Raises ModelError."""
    try:
        for path in weight_files(target):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name == _EMBEDDING or name.endswith(f".{_EMBEDDING}"):
                        return _checked(file.get_tensor(name), target, release)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{target} cannot be read: {error}") from None
    raise ModelError(f"{target} has no {_EMBEDDING}, which a draft head reads")


def _checked(table: Tensor, target: Path, release: Release) -> Tensor:
    rows, columns = table.shape if table.dim() == 2 else (0, 0)
    if rows < release.vocab_size or columns != release.hidden_size or not table.is_floating_point():
        found = f"{tuple(table.shape)} in {table.dtype}"
        wanted = f"{(release.vocab_size, release.hidden_size)} in floating point"
        raise ModelError(
            f"the embeddings of {target} are {found}, a draft head's target has {wanted}",
            field="hidden_size" if columns != release.hidden_size else "vocab_size",
        )
    return table
