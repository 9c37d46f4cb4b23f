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
    "phi3": {"model_type": "phi3", **_COMMON, "sliding_window": 20},
    "olmo2": {"model_type": "olmo2", **_COMMON},
    "granite": {
        "model_type": "granite", **_COMMON, "attention_multiplier": 0.5, "residual_multiplier": 0.4,
        "embedding_multiplier": 3.0, "logits_scaling": 2.0,
    },
    "mixtral": {"model_type": "mixtral", **_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe", **_COMMON, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
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
    "gemma4-shared-kv": {
        "model_type": "gemma4_text", **_COMMON, "head_dim": 8, "global_head_dim": 16, "sliding_window": 20,
        "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "stablelm": {"model_type": "stablelm", **_COMMON},
}  # fmt: skip
"""What is exact. deepseek_v3's keys are wider than its values; gemma4's last layer attends to the keys of an earlier
one, and its layers' heads differ in size; stablelm drops keyword arguments on the way."""

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
    "bidirectional": (
        {"model_type": "gemma3_text", **_COMMON, "head_dim": 8, "use_bidirectional_attention": True},
        "both directions",
    ),
    "not-causal": ({"model_type": "llama", **_COMMON, "is_causal": False}, "both directions"),
    "encoder": ({"model_type": "bert", **_COMMON}, "position 0 sees 1"),
    "heads-that-do-not-divide": (
        {"model_type": "llama", **_COMMON, "hidden_size": 28, "num_attention_heads": 7, "num_key_value_heads": 2},
        "7 query heads, which do not divide into 2 KV heads",
    ),
    "window-that-is-not-passed-on": (
        {"model_type": "phimoe", **_COMMON, "num_local_experts": 4, "sliding_window": 100},
        "position 127 does not see 0",
    ),
    "bloom": ({"model_type": "bloom", "vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "ALiBi"),
    "mpt": (
        {
            "model_type": "mpt", "vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64,
            "expansion_ratio": 2,
        },
        "ALiBi",
    ),
    "falcon": ({"model_type": "falcon", **_COMMON, "alibi": False}, "does not call attention through"),
    "xglm": (
        {
            "model_type": "xglm", "vocab_size": VOCAB, "d_model": 32, "num_layers": 2, "attention_heads": 4,
            "ffn_dim": 48, "max_position_embeddings": 64,
        },
        "0 use the attention interface",
    ),
    "mamba2": (
        {
            "model_type": "mamba2", "vocab_size": VOCAB, "hidden_size": 32, "num_heads": 8, "head_dim": 8,
            "state_size": 8, "n_groups": 1, "num_hidden_layers": 2, "max_position_embeddings": 64,
        },
        "linear_attention layers",
    ),
    "bamba": (
        {
            "model_type": "bamba", **_COMMON, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8,
            "mamba_d_state": 8,
        },
        "linear_attention layers",
    ),
    "jamba": (
        {
            "model_type": "jamba", **_COMMON, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
            "mamba_d_state": 8,
        },
        "linear_attention layers",
    ),
    "lfm2-convolutions": (
        {"model_type": "lfm2", **_COMMON, "layer_types": ["conv", "full_attention", "conv"]}, "conv layers"
    ),
    "sparse-attention": (
        {
            "model_type": "minimax_m3_vl_text", **_COMMON, "head_dim": 8,
            "layer_types": ["minimax_m3_sparse"] * 3, "num_local_experts": 4,
        },
        "minimax_m3_sparse layers",
    ),
    "two-attentions-in-one": ({"model_type": "diffllama", **_COMMON}, "attends twice"),
    "mask-of-its-own": ({"model_type": "doge", **_COMMON}, "mask of its own making"),
    "positions-not-taken": (
        {
            "model_type": "bart", "vocab_size": VOCAB, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48, "max_position_embeddings": 64, "encoder_layers": 2, "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
        },
        "other logits than by itself",
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
