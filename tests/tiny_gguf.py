"""A GGUF file of a llama with a few thousand weights, as a whole or with something in it said otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, WIDE, LAYERS, HEADS = 32, 48, 1, 4
TOKENS = ["<|endoftext|>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), "th", "the"]
MERGES = ["t h", "th e"]


def write(path: Path, *, layers: int = LAYERS, merges: list[str] = MERGES, **said: int) -> Path:
    """`said`: numbers of the architecture beside or instead of the right ones, a key's dots as `__`."""
    writer = GGUFWriter(path, "llama")
    numbers = {
        "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": WIDE, "block_count": layers,
        "attention.head_count": HEADS, "attention.head_count_kv": 2, "vocab_size": len(TOKENS),
        "rope.dimension_count": HIDDEN // HEADS,
    } | {key.replace("__", "."): number for key, number in said.items()}  # fmt: skip
    for key, number in numbers.items():
        writer.add_uint32(f"llama.{key}", number)
    writer.add_name("tiny")
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    for name, shape in shapes(layers).items():
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def shapes(layers: int) -> dict[str, Any]:
    found: dict[str, Any] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    per_layer = {
        "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN),
        "attn_v": (HIDDEN // 2, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (WIDE, HIDDEN),
        "ffn_up": (WIDE, HIDDEN), "ffn_down": (HIDDEN, WIDE),
    }  # fmt: skip
    return found | {f"blk.{i}.{name}.weight": shape for i in range(layers) for name, shape in per_layer.items()}
