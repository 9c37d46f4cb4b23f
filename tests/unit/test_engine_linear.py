"""Fast forms of a linear layer: the same numbers, and the choice follows the measurement."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared.engine import linear
from shared.engine.linear import Choice, WeightFirstLinear, arrange, choose


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(24, 40)
        self.b = nn.Linear(40, 16, bias=False)
        self.head = nn.Linear(16, 64, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(x)))


def times(**forms: float | dict[int, float]) -> linear.Times:
    return {
        (form, rows): value[rows] if isinstance(value, dict) else value
        for form, value in forms.items()
        for rows in linear._ROWS
    }


@pytest.mark.parametrize("choice", [Choice(), Choice(columns=True), Choice(weight_first=7), Choice(True, 7)])
def test_every_form_computes_the_same(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_SAMPLE", 1000)
    monkeypatch.setattr(linear, "choose", lambda times: choice)
    torch.manual_seed(0)
    model = Model().requires_grad_(False)
    inputs = [torch.randn(1, rows, 24) for rows in (0, 1, 2, 5, 7, 8, 33)]
    expected = [model(x) for x in inputs]
    names = dict(model.named_parameters())
    assert arrange(model) == choice
    for x, value in zip(inputs, expected, strict=True):
        out = model(x)
        assert out.shape == value.shape and out.is_contiguous()
        torch.testing.assert_close(out, value, rtol=0, atol=1e-5)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in names.items()}
    assert isinstance(model.a, WeightFirstLinear) == (bool(choice.weight_first) and not choice.columns)
    assert isinstance(model.head, WeightFirstLinear) == bool(choice.weight_first)
    assert (model.a.weight.stride() == (1, 40)) == choice.columns


def test_choices() -> None:
    assert choose(times(linear=1.0, weight_first=2.0, columns=1.0)) == Choice()
    assert choose(times(linear=1.0, weight_first=2.0, columns=0.5)) == Choice(columns=True)
    assert choose(times(linear=1.0, weight_first=0.5, columns=1.0)) == Choice(weight_first=16)
    slow_at_8 = {1: 1.0, 2: 0.6, 4: 0.6, 8: 1.5, 16: 1.5}
    assert choose(times(linear=1.0, weight_first=slow_at_8, columns=1.0)) == Choice(weight_first=7)
    assert choose(times(linear=1.0, weight_first=slow_at_8, columns=0.6)) == Choice(columns=True, weight_first=7)


def test_small_models_are_left_alone() -> None:
    model = Model()
    assert arrange(model) == Choice()
    assert type(model.a) is nn.Linear
