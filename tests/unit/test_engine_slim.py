"""Decoder layers of Llama's shape are found by their parts and by what they compute, and compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from shared.engine import linear
from shared.engine.attention import NAME
from shared.engine.engine import Engine
from shared.engine.linear import Choice, column_product
from shared.engine.merged import Run, product_of, take_over
from shared.engine.norms import fuse
from shared.engine.slim import Rotation, SlimLayer, slim
from shared.engine.span import Span
from tests import tiny_models

LIKE_LLAMA = {
    "llama",
    "llama3-rope",
    "linear-rope",
    "yarn-rope",
    "llama-untied-mqa",
    "llama-tied",
    "qwen2",
    "mistral-window",
}
TOKENS = tuple(range(3, 33))


def replaced(engine: Engine) -> int:
    return sum(isinstance(vars(layer).get("forward"), SlimLayer) for layer in engine._model.module.modules())


def logits(engine: Engine) -> Tensor:
    """Of a prompt, then of a step of three sequences."""
    prompt = engine.forward([Span(TOKENS[:27], 0, (2, 1, 0, 3), 27)])
    others = [Span(TOKENS, 0, (4, 5, 6, 7), 2), Span(TOKENS[4:9], 0, (9,), 5)]
    return torch.cat([prompt, engine.forward([Span((5,), 27, (2, 1, 0, 3), 1), *others])])


@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
def test_whole_models(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_models.write(tmp_path, tiny_models.ARCHITECTURES[name])
    plain = Engine.load(folder, block_size=8, kv_blocks=12)
    assert replaced(plain) == 0, "its products are not merged"
    monkeypatch.setattr(linear, "_SAMPLE", 1)
    monkeypatch.setattr(linear, "choose", lambda measured: Choice("packed"))
    slimmer = Engine.load(folder, block_size=8, kv_blocks=12)
    assert replaced(slimmer) == (plain.info.layers if name in LIKE_LLAMA else 0)
    torch.testing.assert_close(logits(slimmer), logits(plain), rtol=0, atol=1e-4)


def test_in_8_bits(tmp_path: Path) -> None:
    folder = tiny_models.write(tmp_path, tiny_models.ARCHITECTURES["llama"])
    engine = Engine.load(folder, block_size=8, kv_blocks=12, weights="int8")
    assert replaced(engine) == engine.info.layers
    got = logits(engine)
    for layer in engine._model.module.modules():
        vars(layer).pop("forward", None)
    torch.testing.assert_close(got, logits(engine), rtol=0, atol=1e-4)


def layers_of(folder: Path) -> tuple[nn.Module, Any]:
    """A model whose products are merged by hand, and its first layer."""
    tiny_models.write(folder, tiny_models.ARCHITECTURES["llama"])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME)
    model.eval().requires_grad_(False)
    fuse(model)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for run in (
            Run((attention.q_proj, attention.k_proj, attention.v_proj)),
            Run((attention.o_proj,)),
            Run((mlp.gate_proj, mlp.up_proj)),
            Run((mlp.down_proj,)),
        ):
            take_over(run, column_product(run.weight(), run.bias()))
    return model, model.model.layers[0]


class Scaled(LlamaDecoderLayer):
    def forward(self, *given: Any, **named: Any) -> Any:
        return super().forward(*given, **named) * 1.001


class Parallel(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        return super().forward(hidden_states, *given, **named) + self.mlp(self.input_layernorm(hidden_states))


class Changing(LlamaDecoderLayer):
    """Asks attention for another scale each time."""

    def forward(self, *given: Any, **named: Any) -> Any:
        self.self_attn.scaling *= 2
        return super().forward(*given, **named)


class Told(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        return super().forward(hidden_states + named["attention_mask"], *given, **named)


@pytest.mark.parametrize("kind", [Scaled, Parallel, Changing, Told])
def test_what_computes_something_else_stays(kind: type[nn.Module], tmp_path: Path) -> None:
    model, first = layers_of(tmp_path)
    first.__class__ = kind
    assert slim(model) == 2
    assert "forward" not in vars(first)


@pytest.mark.parametrize("odd", ["norm", "projection", "part", "order"])
def test_what_is_built_of_something_else_stays(odd: str, tmp_path: Path) -> None:
    model, first = layers_of(tmp_path)
    if odd == "norm":
        first.input_layernorm = nn.LayerNorm(32)
    elif odd == "projection":
        first.mlp.down_proj = nn.Linear(48, 32)
    elif odd == "part":
        first.self_attn.q_norm = nn.Identity()
    else:
        first.mlp.gate_proj, first.mlp.up_proj = first.mlp.up_proj, first.mlp.gate_proj
    assert slim(model) == 2
    assert "forward" not in vars(first)


def test_products_are_of_one_run_in_its_order(tmp_path: Path) -> None:
    _, layer = layers_of(tmp_path)
    q, k, v, o = (layer.self_attn.get_submodule(f"{name}_proj") for name in "qkvo")
    assert product_of(q, k, v) is not None and product_of(o) is not None
    for wrong in [(q, k), (k, q, v), (q, k, v, o), (q, k, nn.Linear(32, 16)), (nn.Linear(32, 16),)]:
        assert product_of(*wrong) is None


def test_each_pass_has_its_own_rotation() -> None:
    rotation = Rotation()
    given = [(torch.randn(1, n, 8), torch.randn(1, n, 8)) for n in (1, 3, 3)]
    for cosine, sine in [*given, *given]:
        factor, swapped = rotation.of(cosine, sine)
        assert torch.equal(factor[:, 0], cosine[0])
        assert torch.equal(swapped[:, 0, :4], -sine[0, :, :4]) and torch.equal(swapped[:, 0, 4:], sine[0, :, 4:])
        assert rotation.of(cosine, sine)[0] is factor, "once for all layers"


@torch.inference_mode()
def test_two_rows_at_once_are_refused(tmp_path: Path) -> None:
    model, first = layers_of(tmp_path)
    assert slim(model) == 3
    with pytest.raises(ValueError, match="too many values"):
        first(torch.randn(2, 1, 32), position_embeddings=(torch.ones(1, 1, 8), torch.ones(1, 1, 8)))
