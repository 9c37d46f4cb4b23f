"""What a draft token costs, in steps of the target: both as this project's engine runs them, alone and taking turns."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shared.engine.attention import NAME
from shared.engine.engine import Engine
from shared.engine.model import Model
from shared.engine.span import Span
from training.drafter.target import Target, device

CONTEXT = 128
_ROUNDS, _BLOCK = 21, 16


def relative_cost(target: Target, layers: int, proposable: int) -> float:
    """Median over pairs of steps, one sequence of `CONTEXT` tokens each. What the weights are does not matter."""
    shape = target.shape
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=proposable,
        max_position_embeddings=2 * CONTEXT,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config._attn_implementation = NAME
    blocks = CONTEXT // _BLOCK + 2
    whole = Engine.load(target.folder, block_size=_BLOCK, kv_blocks=blocks, lookahead=0, generates=False)
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    module: Any = LlamaForCausalLM(config)
    small = Engine.of(
        Model.of(module.to(device(), dtype)),
        fingerprint="",
        vocabulary="",
        block_size=_BLOCK,
        kv_blocks=blocks,
        lookahead=0,
    )
    for engine in (whole, small):
        engine.forward([Span((0,) * CONTEXT, 0, tuple(range(blocks)), 1)])
        _seconds(engine, blocks)
    return median(_seconds(small, blocks) / _seconds(whole, blocks) for _ in range(_ROUNDS))


def _seconds(engine: Engine, blocks: int) -> float:
    began = time.perf_counter()
    engine.step([Span((0,), CONTEXT, tuple(range(blocks)), 1)])
    return time.perf_counter() - began
