"""How far one engine's predictions are from another's, over texts that both are given token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.engine import Engine
from shared.engine.span import Span
from shared.errors import InvalidField, ModelError

CHUNK = 128
"""Positions whose logits are in memory at a time, once per engine."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Of a candidate against a baseline. Not finite where a model's output is not."""

    perplexity: float
    baseline_perplexity: float
    ratio: float
    """Perplexity over the baseline's."""
    top1_agreement: float
    """Share of positions at which both find the same token most likely."""
    mean_kl: float
    """Kullback-Leibler divergence of the candidate's distribution from the baseline's, in nats per position."""
    tokens: int
    """Positions counted."""


def compare(baseline: Engine, candidate: Engine, windows: Sequence[Sequence[int]]) -> Quality:
    """See `compare_all`."""
    return compare_all(baseline, [candidate], windows)[0]


def compare_all(
    baseline: Engine, candidates: Sequence[Engine], windows: Sequence[Sequence[int]], skip: int = 0
) -> list[Quality]:
    """Each window is a text of its own, read in chunks; all engines must have blocks for the longest.

    The first token and `skip` more of each window are context only. Raises ModelError for engines with different
    vocabularies, InvalidField when a window has nothing to count, RequestError for one that an engine cannot run.
    """
    engines = [baseline, *candidates]
    if len({(engine.info.vocabulary, engine.info.vocab_size) for engine in engines}) > 1:
        raise ModelError("engines with different vocabularies cannot be compared")
    if not windows or min(len(window) for window in windows) < skip + 2:
        raise InvalidField(f"each window must have more than {skip + 1} tokens", field="windows")
    sums = torch.zeros(len(candidates), 4, dtype=torch.float64)
    tokens = 0
    for window in windows:
        chunks = zip(*(_log_probabilities(engine, window) for engine in engines), strict=True)
        for start, (expected, *found) in zip(range(0, len(window) - 1, CHUNK), chunks, strict=True):
            first, count = max(skip - start, 0), len(expected)
            if first < count:
                following = torch.tensor(window[start + first + 1 : start + count + 1])
                sums += torch.stack([_sums(expected[first:], got[first:], following) for got in found])
                tokens += count - first
    return [
        Quality(_exp(loss), _exp(baseline_loss), _exp(loss - baseline_loss), same, divergence, tokens)
        for loss, baseline_loss, same, divergence in (sums / tokens).tolist()
    ]


def _log_probabilities(engine: Engine, window: Sequence[int]) -> Iterator[Tensor]:
    """[up to CHUNK, vocab] for all tokens but the last."""
    table = tuple(range(min(-(-len(window) // engine.info.block_size), engine.info.kv_blocks)))
    for start in range(0, len(window) - 1, CHUNK):
        chunk = tuple(window[start : min(start + CHUNK, len(window) - 1)])
        yield torch.log_softmax(engine.forward([Span(chunk, start, table, len(chunk))]), -1)


def _sums(expected: Tensor, got: Tensor, following: Tensor) -> Tensor:
    """float64: log loss of `got` and of `expected` on the tokens that follow, equal maxima, divergence."""
    picked = following.to(expected.device)[:, None]
    divergence = (expected.exp() * (expected - got)).sum(-1)
    same = expected.argmax(-1) == got.argmax(-1)
    parts = (-got.gather(1, picked), -expected.gather(1, picked), same, divergence)
    return torch.stack([part.double().sum() for part in parts]).cpu()


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf
