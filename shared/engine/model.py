"""A decoder-only transformers model, loaded so that its attention layers call ours; or refused, with the reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from shared.engine.attention import NAME
from shared.engine.codecs.base import LayerShape
from shared.engine.fingerprint import fingerprint, read_json
from shared.engine.int8_linear import quantise
from shared.engine.linear import arrange
from shared.engine.merged import Run, watching
from shared.engine.norms import fuse
from shared.engine.probe import probe
from shared.engine.refuse import refuse_inexact
from shared.engine.slim import slim
from shared.errors import ConfigError, ModelError

KINDS = ("native", "int8")
"""Of weights, as settings name them."""


class Output(NamedTuple):
    """Of a forward pass, a row for each that was asked for."""

    logits: Tensor
    """[rows, vocab] float32"""
    hidden: Tensor
    """What the LM head read, [rows, hidden_size] in the model's dtype."""


@dataclass(frozen=True)
class Model:
    """A loaded model. `shapes` is what each of its layers stores per token."""

    module: Any
    shapes: tuple[LayerShape, ...]
    context_length: int
    vocab_size: int
    eos_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    form: str
    """How its linear layers are computed: "stored", "columns" or "packed", whichever is fastest here, or "int8"."""
    hidden_size: int
    """Channels of what the LM head reads; 0 where that cannot be seen, because it is not called as a module."""

    @classmethod
    def of(
        cls,
        module: Any,
        eos_ids: frozenset[int] = frozenset(),
        *,
        weights: str = "native",
        digest: str = "",
        threads: Collection[int] = (),
    ) -> Model:
        """A causal language model of transformers, its weights of one dtype on one device. Changes it in place: on a
        CPU its linear layers let their weights go for a faster form of them.

        `digest` names the weights, so that processes can share that form. `threads`: see `arrange`. Raises ModelError
        for a model that would not run exactly, ConfigError for weights of a kind that cannot be had.
        """
        text = module.config.get_text_config()
        refuse_inexact(module.config, text)
        module = module.eval().requires_grad_(False)
        head = module.get_output_embeddings()
        weight = head.weight
        context_length = int(text.max_position_embeddings)
        with watching(module) as watch:
            shapes = probe(module, text.num_hidden_layers, context_length, weight.dtype, weight.device)
        vocab_size, dtype, device = int(weight.shape[0]), weight.dtype, weight.device
        hidden_size = int(weight.shape[1]) if any(layer is head for layer, _ in watch.calls) else 0
        on_cpu = device.type == "cpu" and dtype == torch.float32
        form = _prepare(module, weights, watch.runs(), digest, threads, on_cpu)
        return cls(module, shapes, context_length, vocab_size, eos_ids, dtype, device, form, hidden_size)

    def forward(self, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Output:
        """One pass over a flat row of tokens, with output of `rows` of them. `attending` must be in force."""
        read: list[Tensor] = []
        hook = self.module.get_output_embeddings().register_forward_pre_hook(lambda _, given: read.extend(given[:1]))
        try:
            out = self.module(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
            )
        finally:
            hook.remove()
        logits: Tensor = out.logits[0]
        return Output(logits.float(), read[0][0] if self.hidden_size else logits.new_empty(len(rows), 0))


def load(folder: Path, layers: int | None = None, weights: str = "native", threads: Collection[int] = ()) -> Model:
    """The model in `folder` in fp32 on the CPU, or in bf16 on a CUDA GPU; only its first `layers` layers if given.

    `weights="int8"`: linear layers multiply in 8 bits, on the CPU. `threads`: see `arrange`. Raises ModelError for
    weights that cannot be read and for models that would not run exactly, ConfigError for weights of a kind that
    cannot be had.
    """
    if weights not in KINDS:
        raise ConfigError(f"weights are {' or '.join(KINDS)}, not {weights!r}", field="weights")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it lists layers left out on purpose
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        text = config.get_text_config()
        refuse_inexact(config, text)  # before gigabytes are read
        _truncate(text, layers)
        module: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=NAME, local_files_only=True, use_safetensors=True
        )
    except (ValueError, LookupError, OSError, RuntimeError, ImportError) as error:
        if error.args == (NAME,):  # looked up among attention classes of the model's own
            raise ModelError(f"{text.model_type} does not call attention through the attention interface") from error
        raise ModelError(f"{folder} cannot be loaded: {error}") from error
    digest = fingerprint(folder, dtype=str(dtype), layers=layers)
    return Model.of(module.to(device), eos_ids(folder), weights=weights, digest=digest, threads=threads)


def _prepare(
    module: Any, weights: str, runs: Sequence[Run], digest: str, threads: Collection[int], on_cpu: bool
) -> str:
    """Make the model's modules as fast as they can be here. `runs`: which linear layers read the same input."""
    if weights == "int8" and not on_cpu:
        raise ConfigError("int8 weights are for the CPU", field="weights")
    if not on_cpu:
        return "stored"
    fuse(module)
    form: str = weights
    if weights == "int8":
        quantise(runs)
    else:
        form = arrange(module, runs, digest, threads).form
    slim(module)
    return form


def _truncate(text: Any, layers: int | None) -> None:
    if layers is None:
        return
    if not 0 < layers <= text.num_hidden_layers:
        raise ModelError(f"{layers} layers asked for; the model has {text.num_hidden_layers}")
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]


def eos_ids(folder: Path) -> frozenset[int]:
    """Ids that end a text, by the generation config, the model's config and the tokenizer together."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _optional(folder / name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    token = _optional(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = read_json(folder / "tokenizer.json").get("added_tokens") or []
    ids.update(entry["id"] for entry in added if entry["content"] == content)
    return frozenset(ids)


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
