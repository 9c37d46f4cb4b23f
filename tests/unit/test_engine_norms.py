"""RMS norms are found by what they compute, and computed the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from shared.engine.norms import FusedRMSNorm, fuse
from tests import tiny_models


class Gated(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        out = super().forward(hidden_states)
        return out if gate is None else out * gate


class Centred(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


def fused(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 0.5)
    holder = nn.ModuleDict({"norm": norm})
    fuse(holder)
    return holder["norm"]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-5])
@torch.inference_mode()
def test_the_same_numbers(kind: type[nn.Module], epsilon: float) -> None:
    norm = kind(96, eps=epsilon)
    other = fused(norm)
    assert isinstance(other, FusedRMSNorm) and other.weight is norm.weight
    for shape in ((1, 1, 96), (1, 7, 96), (2, 3, 4, 96)):
        for scale in (1e-4, 1.0, 1e4):
            x = torch.randn(shape) * scale
            torch.testing.assert_close(other(x), norm(x), rtol=3e-6, atol=1e-6)
    assert not other(torch.zeros(1, 2, 96)).any()
    assert other(torch.full((1, 1, 96), torch.nan)).isnan().all()


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.Linear(8, 8), nn.Embedding(8, 8), Gated(8), Centred(8)])
def test_what_is_something_else_stays(norm: nn.Module) -> None:
    assert fused(norm) is norm


@pytest.mark.parametrize(("name", "count"), [("llama", 7), ("qwen3", 13), ("gemma3", 19), ("gpt_neox", 0)])
def test_whole_models(name: str, count: int, tmp_path: Path) -> None:
    tiny_models.write(tmp_path, tiny_models.ARCHITECTURES[name])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval().requires_grad_(False)
    tokens = torch.arange(3, 20)[None]
    with torch.inference_mode():
        expected = model(tokens).logits
        assert fuse(model) == count
        torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=1e-5)
    assert fuse(model) == 0
