"""How far a codec moves a model's predictions, against the definitions."""

from __future__ import annotations

import math

import pytest
import torch

from shared.engine import quality
from shared.engine.engine import Engine
from shared.engine.quality import Quality, compare, compare_all
from shared.engine.span import Span
from shared.errors import InvalidField, ModelError
from tests import tiny_models

B = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tiny_models.write(tmp_path_factory.mktemp("llama"), tiny_models.ARCHITECTURES["llama"])
    return Engine.load(folder, block_size=B, kv_blocks=8, kv_codec="none")


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "CHUNK", 7)


def text(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny_models.VOCAB, (length,), generator=generator).tolist()


WINDOWS = [text(1, 50), text(2, 15), text(3, 8), text(4, 2)]


def by_definition(baseline: Engine, candidate: Engine, windows: list[list[int]], skip: int = 0) -> Quality:
    losses, divergences, same = [], [], []
    for window in windows:
        span = Span(tuple(window), 0, tuple(range(8)), len(window))
        p, q = (torch.log_softmax(e.forward([span]).double(), -1) for e in (baseline, candidate))
        for i in range(skip, len(window) - 1):
            losses.append((float(p[i, window[i + 1]]), float(q[i, window[i + 1]])))
            divergences.append(float((p[i].exp() * (p[i] - q[i])).sum()))
            same.append(int(p[i].argmax()) == int(q[i].argmax()))
    n = len(losses)
    theirs, mine = (math.exp(-sum(column) / n) for column in zip(*losses, strict=True))
    return Quality(mine, theirs, mine / theirs, sum(same) / n, sum(divergences) / n, n)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_figures_are_as_defined(engine: Engine, codec: str) -> None:
    got = compare(engine, engine.sibling(codec, 8), WINDOWS)
    expected = by_definition(engine, engine.sibling(codec, 8), WINDOWS)
    assert got.tokens == expected.tokens == 71
    assert got.top1_agreement == expected.top1_agreement
    for name in ("perplexity", "baseline_perplexity", "ratio", "mean_kl"):
        assert getattr(got, name) == pytest.approx(getattr(expected, name), rel=1e-3, abs=1e-6), name
    assert got.mean_kl > 0


@pytest.mark.parametrize("skip", [1, 6, 7, 13])
def test_positions_without_enough_context_are_left_out(engine: Engine, skip: int) -> None:
    windows = WINDOWS[:2]
    got = compare_all(engine, [engine.sibling("int4", 8), engine], windows, skip)
    expected = by_definition(engine, engine.sibling("int4", 8), windows, skip)
    assert got[0].tokens == expected.tokens
    assert got[0].mean_kl == pytest.approx(expected.mean_kl, rel=1e-3)
    assert got[0].perplexity == pytest.approx(expected.perplexity, rel=1e-4)
    assert (got[1].ratio, got[1].top1_agreement, got[1].mean_kl) == (1.0, 1.0, 0.0)


def test_what_cannot_be_compared(engine: Engine) -> None:
    for windows in ([], [[5]], [text(1, 9), []]):
        with pytest.raises(InvalidField) as caught:
            compare(engine, engine, windows)
        assert caught.value.field == "windows"
    with pytest.raises(InvalidField, match="more than 9 tokens"):
        compare_all(engine, [engine], [text(1, 9)], skip=8)
    with pytest.raises(InvalidField, match="blocks for"):
        compare(engine, engine, [text(1, 66)])
    other = Engine.of(engine._model, fingerprint="x", vocabulary="another", kv_blocks=4)
    with pytest.raises(ModelError, match="vocabularies"):
        compare(engine, other, WINDOWS)


def test_a_model_that_is_not_finite_has_no_quality(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = engine.sibling("none", 8)
    monkeypatch.setattr(broken, "forward", lambda spans: torch.full((spans[0].rows, tiny_models.VOCAB), torch.nan))
    got = compare(engine, broken, WINDOWS)
    assert math.isnan(got.ratio) and math.isnan(got.mean_kl) and math.isfinite(got.baseline_perplexity)
