"""GGUF files → the folder layout that transformers reads (fp32 safetensors, tokenizer, chat template).

transformers reads the weights; what it silently drops (tensors it has no name for, rope scaling, the way digits are
split) would make a model that answers a little wrong, so that is checked here and refused. So is a file whose header is
not sound (`shared.engine.gguf_header`): transformers believes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging

from shared.engine import gguf_header
from shared.errors import ModelError

Progress = Callable[[str, float], None]

CONVERTER_VERSION = 1  # of the folders written; part of their names
MAX_REASON = 500  # characters of what a reader says is wrong

# How byte-level vocabularies split text before merging, by llama.cpp's `tokenizer.ggml.pre`. Those that transformers
# splits rightly by itself are listed; SmolLM's it does not know. Any other is refused.
_SPLIT_BY_TRANSFORMERS = frozenset({"default", "gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "tekken", "gpt-4o"})
_DIGITS_ONE_BY_ONE = frozenset({"smollm", "starcoder", "refact", "command-r"})


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write the model in `source` into the existing, empty `folder`. Raises ModelError for what would not be exact."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with _explained(source):
        gguf_header.check(source)
        model, tokenizer = _read(source, progress)
    with _explained(source, OSError):  # of the disk that is written to
        progress("writing safetensors", 0.85)
        vars(model.config).pop("_model_name_or_path", None)  # the GGUF file's title; it says nothing
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _flush(folder)
    progress("done", 1.0)


@contextmanager
def _explained(source: Path, passed: type[Exception] = ModelError) -> Iterator[None]:
    """The libraries raise errors of every kind, all meaning that the file is not as it should be: ModelError here."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ModelError | passed):
            raise
        reason = str(error) or type(error).__name__
        raise ModelError(f"{source.name} cannot be converted: {reason[:MAX_REASON]}") from error


def _read(source: Path, progress: Progress) -> tuple[Any, Any]:
    """Model and tokenizer."""
    progress("reading the GGUF header", 0.0)
    config = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    progress("dequantising the weights", 0.2)
    parsed = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
        str(source), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )
    progress("building the tokenizer", 0.7)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    _refuse_unread(source, parsed["tensors"])
    _fill(model, parsed["tensors"])
    _split_as_trained(tokenizer.backend_tokenizer, parsed["tokenizer"])
    _check_vocabulary(tokenizer, parsed["tokenizer"])
    tokenizer.model_max_length = config.max_position_embeddings
    return model, tokenizer


def _refuse_unread(source: Path, tensors: dict[str, torch.Tensor]) -> None:
    metadata, names = read_gguf_metadata(str(source))
    scaling = [key for key, value in metadata.items() if key.endswith(".rope.scaling.type") and value != "none"]
    if scaling:
        raise ModelError(f"{source.name}: rope scaling ({scaling[0]}) is not read from GGUF files; use safetensors")
    if len(tensors) != len(names):
        raise ModelError(f"{source.name} holds {len(names)} tensors, of which {len(tensors)} have a known use")


def _fill(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Give the model its weights. A tied output layer has none of its own."""
    result = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty or result.unexpected_keys:
        raise ModelError(f"weights do not fit the model: missing {empty[:3]}, unexpected {result.unexpected_keys[:3]}")


def _split_as_trained(tokenizer: Tokenizer, described: dict[str, Any]) -> None:
    if described.get("tokenizer_type") != "gpt2":
        return
    split = described.get("pre_tokenizer_type", "default")
    if split in _DIGITS_ONE_BY_ONE:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif split not in _SPLIT_BY_TRANSFORMERS:
        raise ModelError(f"the GGUF file splits text as {split!r}, which is not known here; use safetensors")


def _check_vocabulary(tokenizer: Any, described: dict[str, Any]) -> None:
    """Every token must have the id that the file gives it, or all text would be read wrongly."""
    tokens = described["tokens"]
    ids = tokenizer.convert_tokens_to_ids(tokens)
    wrong = [i for i, found in enumerate(ids) if found != i]
    if wrong or len(tokenizer) != len(tokens):
        raise ModelError(f"the GGUF file's tokenizer cannot be rebuilt: {len(wrong)} of {len(tokens)} ids differ")


def _flush(folder: Path) -> None:
    """To disk before the folder gets its final name: a power cut must not leave a half-written model there."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
