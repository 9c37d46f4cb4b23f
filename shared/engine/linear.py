"""Matrix products of a few rows, the shape of decoding, in the form that is fastest on this CPU.

BLAS libraries differ by a factor of two here. `x @ W.T` as a linear layer calls it, `(W @ x.T).T`, and the first with
`W` stored column by column all read the same numbers; which one keeps up with memory depends on library, CPU and
thread count. So it is measured at load, on the model's own weights, in a few tenths of a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_ROWS = (1, 2, 4, 8, 16)
_SAMPLE = 8 << 20
"""Numbers in the weights measured: more than caches hold. Smaller models are left alone."""
_REPEATS = 4
_WORTH_A_COPY = 0.8
"""Column-wise weights are a private copy, while weights as stored are shared with other processes."""

Product = Callable[[Tensor, Tensor], Tensor]
Times = dict[tuple[str, int], float]
"""Seconds of a form ("linear", "weight_first", "columns") with a number of rows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`columns`: store weights column by column. `weight_first`: use `(W @ x.T).T` for 2 to that many rows, where the
    weights are stored row by row. The output layer always is: it shares its weights with the embedding."""

    columns: bool = False
    weight_first: int = 0


def choose(times: Times) -> Choice:
    """The form that takes least time over all numbers of rows."""

    def total(limit: int) -> float:
        return sum(times["weight_first" if 1 < rows <= limit else "linear", rows] for rows in _ROWS)

    limits = [following - 1 for following in _ROWS[1:]] + [_ROWS[-1]]
    best = min(limits, key=total)
    columns = sum(times["columns", rows] for rows in _ROWS) < _WORTH_A_COPY * total(best)
    return Choice(columns, best if best > 1 else 0)


class WeightFirstLinear(nn.Linear):
    """A linear layer that computes `(W @ x.T).T` for 2 to `limit` rows."""

    limit = 0

    @classmethod
    def take_over(cls, layer: nn.Linear, limit: int) -> None:
        """Make `layer` one of these, with the parameters it has."""
        layer.__class__ = cls
        vars(layer)["limit"] = limit

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        if not 1 < rows <= self.limit:
            return linear(input, self.weight, self.bias)
        flat = input.reshape(rows, self.in_features).t()
        out = self.weight @ flat if self.bias is None else torch.addmm(self.bias[:, None], self.weight, flat)
        return out.t().contiguous().view(*input.shape[:-1], self.out_features)


def arrange(module: Any) -> Choice:
    """Put the linear layers of a model on the CPU into their fastest form. Same parameters, same shapes."""
    head = module.get_output_embeddings()
    layers = [m for m in module.modules() if type(m) is nn.Linear and m is not head]
    sample = _sample(layers)
    if not sample:
        return Choice()
    with torch.inference_mode():
        choice = choose(_measure(sample))
    if choice.columns:
        for layer in layers:
            layer.weight = nn.Parameter(layer.weight.t().contiguous().t(), requires_grad=False)
    for layer in [head] if choice.columns else [*layers, head]:
        if type(layer) is nn.Linear and choice.weight_first:
            WeightFirstLinear.take_over(layer, choice.weight_first)
    return choice


def _sample(layers: Sequence[nn.Linear]) -> list[Tensor]:
    """The first layers' weights, enough of them not to fit into caches; none if there are not so many."""
    weights: list[Tensor] = []
    total = 0
    for layer in layers:
        weights.append(layer.weight)
        total += layer.weight.numel()
        if total >= _SAMPLE:
            return weights
    return []


def _measure(weights: Sequence[Tensor]) -> Times:
    by_column = [w.t().contiguous().t() for w in weights]
    forms: dict[str, tuple[Sequence[Tensor], Product]] = {
        "linear": (weights, linear),
        "weight_first": (weights, lambda x, w: (w @ x.t()).t().contiguous()),
        "columns": (by_column, linear),
    }
    times: Times = {}
    for _ in range(_REPEATS):  # outermost, so that a busy neighbour slows all forms alike
        for rows in _ROWS:
            inputs = {w.shape[1]: torch.ones(rows, w.shape[1]) for w in weights}
            for form, (operands, product) in forms.items():
                begin = time.perf_counter()
                for w in operands:
                    product(inputs[w.shape[1]], w)
                seconds = time.perf_counter() - begin
                times[form, rows] = min(seconds, times.get((form, rows), seconds))
    return times
