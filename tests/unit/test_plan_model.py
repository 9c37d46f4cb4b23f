"""`trine plan`: what it reads of a model's files, and how much of a model a step reads."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ModelError
from tests import tiny_gguf
from trine.plan_cost import Costs
from trine.plan_files import shape_of
from trine.plan_hardware import HARDWARE, named
from trine.plan_model import CODECS, ModelShape

LLAMA = ModelShape("llama-8b", 32, 32, 8, 128, 128, 8.03e9, 8.03e9)
SMOL = ModelShape("smollm2-135m", 30, 9, 3, 64, 64, 134_515_008, 134_515_008, 4, 4)
MIXTRAL = ModelShape("mixtral-8x7b", 32, 32, 8, 128, 128, 46.7e9, 12.9e9)
LATENT = ModelShape("deepseek-v3", 61, 128, 128, 192, 128, 671e9, 37e9)

LLAMA_CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
    "intermediate_size": 128, "vocab_size": 100, "dtype": "bfloat16", "tie_word_embeddings": True,
}  # fmt: skip
V3_CONFIG = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
    "intermediate_size": 18432, "vocab_size": 129280, "dtype": "bfloat16", "head_dim": 64, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
}  # fmt: skip
V2_LITE_CONFIG = V3_CONFIG | {
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 2048,
    "intermediate_size": 10944, "vocab_size": 102400, "q_lora_rank": None, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
}  # fmt: skip
MIXTRAL_CONFIG = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN3_CONFIG = {
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_size": 2048,
    "intermediate_size": 6144, "vocab_size": 151936, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}  # fmt: skip
QWEN1_5_CONFIG = {
    "num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 2048, "intermediate_size": 5632,
    "vocab_size": 151936, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}  # fmt: skip


def folder(path: Path, config: Any) -> Path:
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def kv_bytes_of_the_engine(shape: ModelShape, codec: str) -> float:
    import torch

    from shared.engine.codecs.base import LayerShape
    from shared.engine.codecs.registry import codec_of
    from shared.engine.pool import BlockLayout

    layers = [LayerShape(shape.kv_heads, shape.k_dim, shape.v_dim)] * shape.layers
    dtype = {2: torch.bfloat16, 4: torch.float32}[shape.kv_dtype_bytes]
    return BlockLayout.of(layers, 16, dtype, codec_of(codec)).block_bytes / 16


ODD = ModelShape("odd", 2, 3, 1, 70, 70, 1e6, 1e6)
UNEVEN = ModelShape("uneven", 2, 3, 3, 67, 35, 1e6, 1e6, 1, 4)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [LLAMA, SMOL, LATENT, ODD, UNEVEN], ids=lambda s: s.name)
def test_kv_bytes_are_those_of_the_pool(shape: ModelShape, codec: str) -> None:
    assert shape.kv_bytes(codec) == kv_bytes_of_the_engine(shape, codec)


def test_a_smaller_codec_fits_no_fewer() -> None:
    for card in HARDWARE.values():
        fitting = [Costs(LLAMA, card, codec).fitting(2000) for codec in CODECS]
        assert fitting == sorted(fitting)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(0, 1000))
def test_a_step_reads_the_experts_that_its_positions_draw(positions: int, seed: int) -> None:
    mixed = ModelShape("mixed", 1, 1, 1, 8, 8, 64.0, 16.0, 1)  # nothing but experts: 64, 16 of them for a token
    draw = random.Random(seed)
    rounds = 300
    read = sum(len({e for _ in range(positions) for e in draw.sample(range(64), 16)}) for _ in range(rounds)) / rounds
    assert mixed.read_bytes(positions) == pytest.approx(read, abs=0.7)


def test_a_fuller_step_of_experts_takes_longer_and_one_of_a_dense_model_does_not() -> None:
    card = named("h200")
    mixed, dense = Costs(MIXTRAL, card, "none"), Costs(LLAMA, card, "none")
    assert MIXTRAL.read_bytes(1) == pytest.approx(12.9e9 * 2)
    assert mixed.step_s(16, 1, 1) > 3 * mixed.step_s(1, 1, 1), "nearly all experts instead of two"
    assert mixed.step_s(1, 16, 1) == pytest.approx(mixed.step_s(16, 1, 1), rel=1e-3), "drafts draw experts too"
    assert dense.step_s(16, 1, 1) == pytest.approx(dense.step_s(1, 1, 1), rel=1e-3)
    # A chunk reads all weights, which takes longer than multiplying with few of them: 1.2 TB at 70 % of 4.8 TB/s.
    sparse = Costs(replace(MIXTRAL, params=600e9, active=1e9), card, "none")
    assert sparse.chunk_tokens() / sparse.prefill_rate(500) == pytest.approx(1200e9 / (0.7 * 4.8e12) + 0.002, rel=1e-3)


def test_the_shape_of_a_folder(tmp_path: Path) -> None:
    shape = shape_of(folder(tmp_path, LLAMA_CONFIG))
    assert (shape.layers, shape.kv_heads, shape.k_dim, shape.v_dim, shape.dtype_bytes) == (2, 2, 16, 16, 2)
    assert shape.params == shape.active == 2 * (64 * 16 * 12 + 3 * 64 * 128) + 6400
    mixed = shape_of(folder(tmp_path, LLAMA_CONFIG | {"num_local_experts": 8, "num_experts_per_tok": 2}))
    assert mixed.active == mixed.params - 6 * 3 * 64 * 128 * 2


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        (V3_CONFIG, 671, 37.5),  # arXiv 2412.19437: 671B, 37B
        (V2_LITE_CONFIG, 15.7, 2.7),  # arXiv 2405.04434: 15.7B, 2.4B without embeddings
        (MIXTRAL_CONFIG, 46.7, 12.9),  # arXiv 2401.04088
        (QWEN3_CONFIG, 30.5, 3.3),  # arXiv 2505.09388
        (QWEN1_5_CONFIG, 14.3, 2.7),  # Qwen1.5-MoE-A2.7B
    ],
    ids=["deepseek-v3", "deepseek-v2-lite", "mixtral", "qwen3-30b-a3b", "qwen1.5-moe"],
)
def test_mixtures_weigh_what_their_makers_say(
    tmp_path: Path, config: dict[str, Any], billions: float, active: float
) -> None:
    shape = shape_of(folder(tmp_path, config))
    assert shape.params / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active / 1e9 == pytest.approx(active, rel=0.03)


def test_latent_attention_is_served_expanded(tmp_path: Path) -> None:
    shape = shape_of(folder(tmp_path, V3_CONFIG))
    assert (shape.kv_heads, shape.k_dim, shape.v_dim) == (128, 192, 128)
    assert shape.kv_bytes() == 61 * 128 * (192 + 128) * 2


def test_idle_experts_are_a_share_of_what_files_hold(tmp_path: Path) -> None:
    whole = shape_of(folder(tmp_path, MIXTRAL_CONFIG))
    header = json.dumps({"packed": {"shape": [1000, 10]}, "__metadata__": {"format": "pt"}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    stored = shape_of(tmp_path)
    assert stored.params == 10_000
    assert stored.active / stored.params == pytest.approx(whole.active / whole.params)


BAD_CONFIGS = {
    "cut off": "{",
    "a list": "[]",
    "nothing said": {},
    "a word for a number": LLAMA_CONFIG | {"num_attention_heads": "x"},
    "no heads": LLAMA_CONFIG | {"num_attention_heads": 0},
    "no layers": LLAMA_CONFIG | {"num_hidden_layers": 0},
    "no width": LLAMA_CONFIG | {"hidden_size": 0, "vocab_size": 0},
    "fewer than none": LLAMA_CONFIG | {"num_hidden_layers": -1},
    "infinitely many": json.dumps(LLAMA_CONFIG | {"num_hidden_layers": float("inf")}),
    "not a number": json.dumps(LLAMA_CONFIG | {"vocab_size": float("nan")}),
    "more than a float": LLAMA_CONFIG | {"vocab_size": 10**400},
    "a list inside": LLAMA_CONFIG | {"text_config": [1]},
    "dtype is a list": LLAMA_CONFIG | {"dtype": ["float32"]},
    "half of latent attention": LLAMA_CONFIG | {"kv_lora_rank": 16},
    "experts by another name": LLAMA_CONFIG | {"moe_num_experts": 64},
    "very deep": '{"a":' * 100_000,
}


@pytest.mark.parametrize("config", BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_configuration_that_says_too_little(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ModelError):
        shape_of(folder(tmp_path, config))


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"w": 1}', b'{"w": {"shape": [1e400]}}', b'{"w": {"shape": [-4]}}'])
def test_a_header_that_says_too_little(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelError):
        shape_of(folder(tmp_path, LLAMA_CONFIG))


def gguf(path: Path, numbers: dict[str, int], tensors: dict[str, tuple[int, ...]]) -> Path:
    writer = GGUFWriter(path, "some")
    for key, number in ({"block_count": 1, "embedding_length": 64, "attention.head_count": 4} | numbers).items():
        writer.add_uint32(f"some.{key}", number)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_shape_of_a_gguf_file(tmp_path: Path) -> None:
    plain = shape_of(tiny_gguf.write(tmp_path / "plain.gguf"))
    assert (plain.layers, plain.heads, plain.kv_heads, plain.k_dim, plain.v_dim) == (1, 4, 2, 8, 8)
    assert plain.active == plain.params
    weights = {"token_embd.weight": (10, 64), "blk.0.ffn_gate_exps.weight": (8, 4, 64)}
    mixed = shape_of(gguf(tmp_path / "mixed.gguf", {"expert_count": 8, "expert_used_count": 2}, weights))
    assert (mixed.params, mixed.active) == (640 + 2048, 640 + 512)
    latent = {
        "attention.kv_lora_rank": 32, "attention.head_count_kv": 1, "attention.key_length": 40,
        "attention.value_length": 32, "attention.key_length_mla": 24, "attention.value_length_mla": 16,
    }  # fmt: skip
    expanded = shape_of(gguf(tmp_path / "latent.gguf", latent, {"token_embd.weight": (10, 64)}))
    assert (expanded.kv_heads, expanded.k_dim, expanded.v_dim) == (4, 24, 16)


@pytest.mark.parametrize(
    "numbers",
    [
        {"attention.head_count": 0},
        {"block_count": 0},
        {"expert_count": 8, "expert_used_count": 2},  # and no weights of experts
        {"attention.key_length": 1 << 30},
    ],
)
def test_a_gguf_file_that_says_too_little(tmp_path: Path, numbers: dict[str, int]) -> None:
    with pytest.raises(ModelError):
        shape_of(gguf(tmp_path / "bad.gguf", numbers, {"token_embd.weight": (10, 64)}))
