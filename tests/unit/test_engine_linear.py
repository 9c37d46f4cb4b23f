"""Fast forms of linear layers: the same numbers, and the choice follows the measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shared.engine import linear
from shared.engine.engine import Engine
from shared.engine.linear import Choice, WeightFirstLinear, arrange, choose
from shared.engine.merged import PartLinear, Run, names, watching
from shared.engine.span import Span
from tests import tiny_models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(24, 40)
        self.k = nn.Linear(24, 16, bias=False)
        self.o = nn.Linear(56, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(torch.cat([self.q(x), self.k(x)], dim=-1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.twice = nn.Linear(24, 24)
        self.head = nn.Linear(24, 64, bias=False)
        self.idle = nn.Linear(24, 24)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.twice(self.twice(self.block(x))))


def made() -> tuple[Model, list[Run]]:
    torch.manual_seed(0)
    model = Model().requires_grad_(False)
    with watching(model) as watch:
        model(torch.randn(1, 3, 24))
    return model, watch.runs()


def times(**ways: float | dict[int, float]) -> linear.Times:
    return {
        (way, rows): value[rows] if isinstance(value, dict) else value
        for way, value in ways.items()
        for rows in linear._ROWS
    }


FORMS = [
    Choice(),
    Choice(weight_first=7),
    Choice("columns"),
    Choice("columns", 7),
    Choice("packed"),
    Choice("packed", padded=True),
]


@pytest.mark.parametrize("choice", FORMS)
def test_every_form_computes_the_same(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(linear, "_SAMPLE", 1000)
    monkeypatch.setattr(linear, "choose", lambda measured: choice)
    model, runs = made()
    inputs = [torch.randn(1, rows, 24) for rows in (0, 1, 2, 5, 7, 8, 33)]
    expected = [model(x) for x in inputs]
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert arrange(model, runs) == choice
    for x, value in zip(inputs, expected, strict=True):
        out = model(x)
        assert out.shape == value.shape
        torch.testing.assert_close(out, value, rtol=0, atol=1e-5)
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    merged = choice.form != "stored"
    assert isinstance(model.block.q, PartLinear) == merged
    assert isinstance(model.block.q, WeightFirstLinear) == (not merged and bool(choice.weight_first))
    assert isinstance(model.head, WeightFirstLinear) == (choice.form != "packed" and bool(choice.weight_first))
    assert type(model.twice) is nn.Linear and type(model.idle) is nn.Linear


def test_layers_that_read_one_input_make_one_run() -> None:
    model, runs = made()
    assert names(model, runs) == ["block.q+block.k", "block.o", "head"]
    assert runs[0].weight().shape == (56, 24)
    bias = runs[0].bias()
    assert bias is not None and torch.equal(bias[:40], model.block.q.bias) and not bias[40:].any()


def test_a_part_is_right_whatever_was_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_SAMPLE", 1000)
    monkeypatch.setattr(linear, "choose", lambda measured: Choice("packed"))
    model, runs = made()
    one, other = torch.randn(2, 4, 24)
    expected = {(layer, x): layer(x) for layer in (model.block.q, model.block.k) for x in (one, other)}
    q, k = model.block.q, model.block.k
    arrange(model, runs)
    asked = [(q, one), (k, other), (q, other), (q, one), (q, one), (k, one), (k, one), (q, other), (k, other)]
    for layer, x in asked:
        torch.testing.assert_close(layer(x), expected[layer, x], rtol=0, atol=1e-5)
    assert isinstance(q, PartLinear)
    assert q.shared._input is None and q.shared._parts == [None, None]  # nothing is kept


def test_choices() -> None:
    def chosen(**ways: float | dict[int, float]) -> Choice:
        return choose({1: times(**ways)})

    assert chosen(linear=1.0, weight_first=2.0, columns=1.0, packed=1.0) == Choice()
    assert chosen(linear=1.0, weight_first=2.0, columns=0.5) == Choice("columns")
    assert chosen(linear=1.0, weight_first=2.0, columns=0.5, packed=0.4) == Choice("packed")
    assert chosen(linear=1.0, weight_first=0.5, columns=1.0) == Choice(weight_first=16)
    slow_at_9 = {1: 1.0, 2: 0.6, 5: 0.6, 9: 1.5, 16: 1.5}
    assert chosen(linear=1.0, weight_first=slow_at_9, columns=1.0) == Choice(weight_first=8)
    assert chosen(linear=1.0, weight_first=slow_at_9, columns=0.6) == Choice("columns", 8)


def test_all_numbers_of_threads_count_alike() -> None:
    """By column it is faster with one thread, packed with two; what both take together decides."""
    one, two = times(linear=1.0, weight_first=2.0, columns=0.6, packed=0.8), {"linear": 1.0, "weight_first": 2.0}
    assert choose({1: one}).form == "columns"
    assert choose({1: one, 2: times(**two, columns=0.9, packed=0.5)}) == Choice("packed")
    assert choose({1: one, 2: times(**two, columns=0.6, packed=0.5)}).form == "columns"


def test_few_rows_are_padded_where_that_is_faster() -> None:
    packed = {1: 0.5, 2: 0.6, 5: 0.4, 9: 0.4, 16: 0.4}
    ways: dict[str, float | dict[int, float]] = {"linear": 1.0, "weight_first": 2.0, "columns": 0.9, "packed": packed}
    assert choose({1: times(**ways, padded=0.4)}) == Choice("packed", padded=True)
    assert choose({1: times(**ways, padded=0.4), 2: times(**ways, padded=0.9)}) == Choice("packed")
    slow_pairs = {1: 0.9, 2: 0.9, 5: 0.4, 9: 0.4, 16: 0.4}
    padding_decides = times(linear=1.0, weight_first=2.0, columns=0.55, packed=slow_pairs, padded=0.4)
    assert choose({1: padding_decides}) == Choice("packed", padded=True)


def test_rows_are_added_to_few_and_cut_off_again() -> None:
    asked: list[torch.Tensor] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        asked.append(x)
        return x * 2

    padded = linear.padded_product(product)
    for rows in (1, 2, 3, 4, 5):
        x = torch.randn(rows, 3)
        assert torch.equal(padded(x), x * 2)
        assert len(asked[-1]) == max(rows, linear.PADDED) and not asked[-1][rows:].any()


def test_small_models_are_left_alone() -> None:
    model, runs = made()
    assert arrange(model, runs) == Choice()
    assert type(model.block.q) is nn.Linear


def test_measuring_covers_every_way() -> None:
    _, runs = made()
    before = torch.get_num_threads()
    with torch.inference_mode():
        measured = linear._over([1, 2], runs)
    assert set(measured) == {1, 2} and torch.get_num_threads() == before
    for found in measured.values():
        assert {way for way, _ in found} >= {"linear", "weight_first", "columns"}
        assert all(seconds >= 0 for seconds in found.values())


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt_neox", "gpt_oss-sinks", "deepseek_v3", "stablelm"])
def test_models_stay_exact(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_models.write(tmp_path, tiny_models.ARCHITECTURES[name])
    tokens = tuple(range(3, 30))

    def logits(engine: Engine) -> torch.Tensor:
        prefill = engine.forward([Span(tokens, 0, (2, 1, 0, 3), 27)])
        return torch.cat([prefill, engine.forward([Span((5,), 27, (2, 1, 0, 3), 1)])])

    expected = logits(Engine.load(folder, block_size=8, kv_blocks=8))
    monkeypatch.setattr(linear, "_SAMPLE", 1)
    monkeypatch.setattr(linear, "choose", lambda measured: Choice("packed", padded=True))
    monkeypatch.setenv("TRINE_CACHE_DIR", str(tmp_path / "cache"))
    torch.testing.assert_close(logits(Engine.load(folder, block_size=8, kv_blocks=8)), expected, rtol=0, atol=1e-4)
