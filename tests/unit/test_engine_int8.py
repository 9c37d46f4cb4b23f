"""Weights of 8 bits: exact integers inside, so that a row never depends on its neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.config import DEFAULT_MODEL
from shared.engine.engine import Engine
from shared.engine.int8_linear import int8_product, split
from shared.engine.quality import compare
from shared.engine.span import Span
from shared.engine.weights import resolve
from shared.errors import ConfigError
from shared.tokenizer import Tokenizer
from tests import tiny_models

TEXT = Path(__file__).parents[2] / "trine" / "data" / "lantern_bay.txt"


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same quantisation, in float64 and with exact sums."""
    digits, factor = split(x)
    high, low = digits.round().double()
    per_row = weight.abs().amax(1) / 127
    quantised = (weight / per_row[:, None]).round().double()
    return ((high + low / 126) / factor) @ (quantised * per_row[:, None]).t()


@pytest.mark.parametrize(("rows", "size", "out"), [(1, 24, 40), (3, 576, 192), (17, 100, 33), (130, 64, 64)])
def test_products(rows: int, size: int, out: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, size), torch.randn(out, size), torch.randn(out)
    got = int8_product(weight, bias)(x)
    torch.testing.assert_close(got, (reference(x, weight) + bias).float(), rtol=0, atol=2e-4)
    exact = x @ weight.t() + bias
    assert (got - exact).norm() <= 0.012 * exact.norm()


def test_nothing_saturates() -> None:
    """Pairs of products are added in 16 bits on CPUs without VNNI: the largest weights meet the largest inputs."""
    weight = torch.ones(16, 512)
    weight[1::2] = -1
    x = torch.stack([torch.ones(512), -torch.ones(512), torch.ones(512) * 1e-4])
    torch.testing.assert_close(int8_product(weight, None)(x), x @ weight.t(), rtol=1e-5, atol=0)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Not by one bit, and not even if they are much larger or unusable."""
    torch.manual_seed(0)
    product, x = int8_product(torch.randn(96, 576), torch.randn(96)), torch.randn(40, 576)
    alone = torch.cat([product(row[None]) for row in x])
    assert torch.equal(product(x), alone)
    for count in (2, 5, 9, 16, 17):
        assert torch.equal(product(x[:count]), alone[:count])
    loud = torch.cat([x[:3], x[3:4] * 1e6, torch.full((1, 576), torch.nan), torch.full((1, 576), torch.inf)])
    out = product(loud)
    assert torch.equal(out[:3], alone[:3])
    assert not out[4].isfinite().any() and not out[5].isfinite().any()


def test_zeros_and_outliers() -> None:
    weight = torch.zeros(4, 32)
    weight[1, 5] = 3.0
    weight[2] = 1e-3
    x = torch.zeros(3, 32)
    x[1, 5] = 1e4
    x[2] = 1e-3
    got = int8_product(weight, None)(x)
    torch.testing.assert_close(got, x @ weight.t(), rtol=1e-3, atol=1e-6)
    assert not got[0].any() and not got[:, 0].any()


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "gemma3", "deepseek_v3"])
def test_engines(name: str, tmp_path: Path) -> None:
    folder = tiny_models.write(tmp_path, tiny_models.ARCHITECTURES[name])
    native, int8 = (Engine.load(folder, block_size=8, kv_blocks=16, weights=kind) for kind in ("native", "int8"))
    assert int8.info.fingerprint != native.info.fingerprint  # their KV differs
    assert int8.info.dtype == native.info.dtype == "float32"
    tokens = tuple(range(3, 30))
    expected, got = (engine.forward([Span(tokens, 0, (2, 1, 0, 3), 27)]) for engine in (native, int8))
    error = (got - expected).norm() / expected.norm()
    assert 0 < error < 0.1  # of random weights; among experts some choice falls otherwise
    together = int8.forward([Span(tokens[:9], 0, (4, 5), 9), Span(tokens, 0, (6, 7, 8, 9), 27)])
    torch.testing.assert_close(together[9:], got, rtol=0, atol=1e-5)


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    folder = tiny_models.write(tmp_path, tiny_models.ARCHITECTURES["llama"])
    with pytest.raises(ConfigError, match="native or int8") as caught:
        Engine.load(folder, block_size=8, kv_blocks=4, weights="int3")
    assert caught.value.field == "weights"


@pytest.mark.slow
def test_quality_of_the_default_model() -> None:
    folder = resolve(DEFAULT_MODEL)
    tokens = Tokenizer.load(folder).encode(TEXT.read_text(encoding="utf-8"))[:1024]
    native, int8 = (Engine.load(folder, kv_memory_mb=128, weights=kind) for kind in ("native", "int8"))
    found = compare(native, int8, [tokens[:512], tokens[512:]])
    assert found.ratio <= 1.04
    assert found.top1_agreement >= 0.95
