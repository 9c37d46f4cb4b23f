"""Random models of a few thousand weights, one per kind of architecture, as folders that the engine loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def _rope(kind: str, **extra: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **extra}}


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_COMMON},
    "llama3-rope": {
        "model_type": "llama", **_COMMON,
        **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    },
    "linear-rope": {"model_type": "llama", **_COMMON, **_rope("linear", factor=4.0)},
    "yarn-rope": {"model_type": "llama", **_COMMON, **_rope("yarn", factor=4.0, original_max_position_embeddings=64)},
    "llama-untied-mqa": {"model_type": "llama", **_COMMON, "num_key_value_heads": 1, "head_dim": 20},
    "llama-tied": {"model_type": "llama", **_COMMON, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_COMMON},
    "qwen3": {"model_type": "qwen3", **_COMMON, "head_dim": 16},
    "mistral-window": {"model_type": "mistral", **_COMMON, "sliding_window": 20, "head_dim": 8},
    "gemma2": {
        "model_type": "gemma2", **_COMMON, "head_dim": 8, "sliding_window": 20, "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16,
    },
    "gemma3": {"model_type": "gemma3_text", **_COMMON, "head_dim": 8, "sliding_window": 20},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt_neox": {
        "model_type": "gpt_neox", **{k: v for k, v in _COMMON.items() if k != "num_key_value_heads"},
    },
    "gpt_oss-sinks": {
        "model_type": "gpt_oss", **_COMMON, "head_dim": 8, "sliding_window": 20, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", **_COMMON, "num_key_value_heads": 4, "moe_intermediate_size": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1,
    },
    "stablelm": {"model_type": "stablelm", **_COMMON},
}  # fmt: skip
"""What is exact. deepseek_v3's keys are wider than its values; stablelm drops keyword arguments on the way."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dynamic-rope": ({"model_type": "llama", **_COMMON, **_rope("dynamic", factor=2.0)}, "dynamic rope"),
    "longrope": (
        {
            "model_type": "phi3", **_COMMON, "original_max_position_embeddings": 64, "partial_rotary_factor": 1.0,
            **_rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=64),
        },
        "longrope rope",
    ),
    "llama4": (
        {
            "model_type": "llama4_text", **_COMMON, "intermediate_size_mlp": 48, "head_dim": 8, "num_local_experts": 2,
            "attention_chunk_size": 32,
        },
        "chunks",
    ),
    "bloom": ({"model_type": "bloom", "vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "bloom"),
    "mamba2": (
        {
            "model_type": "mamba2", "vocab_size": VOCAB, "hidden_size": 32, "num_heads": 8, "head_dim": 8,
            "state_size": 8, "n_groups": 1, "num_hidden_layers": 2, "max_position_embeddings": 64,
        },
        "mamba2",
    ),
    "bidirectional": (
        {"model_type": "gemma3_text", **_COMMON, "head_dim": 8, "use_bidirectional_attention": True},
        "both directions",
    ),
}  # fmt: skip
"""Models that would load and answer wrongly, and a word of the reason given."""


def write(folder: Path, architecture: dict[str, Any], seed: int = 0) -> Path:
    """A model of this configuration with random weights, large enough that logits differ clearly."""
    torch.manual_seed(seed)
    settings = dict(architecture)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            elif "sinks" in name:
                parameter.normal_(std=2.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    vocab = {f"t{i}": i for i in range(VOCAB)}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(folder / "tokenizer.json"))
