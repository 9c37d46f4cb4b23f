"""The default model's weights as llama.cpp takes them: a GGUF file in fp32, made of the one that Trine reads itself.

Norms, shapes and the order of rows stay as they are; quantised tensors become the fp32 values that they stand for, as
Trine and `transformers` read them. So all peers compute with the same numbers.
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf

from shared.config import DEFAULT_MODEL, cache_home
from shared.engine.weights import BUILT_IN, packaged_gguf

_OWN = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
"""Fields that the writer sets by itself, or that would be wrong now."""


def f32_gguf() -> Path:
    """Made once, beside the converted weights. Raises ModelError when the packaged weights are not installed."""
    target = cache_home() / "models" / f"{DEFAULT_MODEL}-f32.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".part-{os.getpid()}")
        try:
            _write(gguf.GGUFReader(packaged_gguf(BUILT_IN[DEFAULT_MODEL])), part)
            part.rename(target)
        finally:
            part.unlink(missing_ok=True)
    return target


def _write(source: gguf.GGUFReader, target: Path) -> None:
    writer = gguf.GGUFWriter(target, source.fields["general.architecture"].contents())
    for name, field in source.fields.items():
        if not name.startswith(_OWN):
            kind = field.types[0]
            element = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, element)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
