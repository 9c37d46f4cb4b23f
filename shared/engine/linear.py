"""Matrix products of a few rows, the shape of decoding, in the form that is fastest on this CPU.

Each number of the weights is used once per row, so that a product of few rows can be as fast as memory, and is not:
BLAS libraries first copy the weights into an order that their kernels like, which costs more than the product. What
helps depends on library, CPU and thread count. So it is measured at load, on the model's own weights, in a few tenths
of a second.

| ms for all layers of SmolLM2-135M, AVX2, one thread | 1 row | 2 | 4 | 5 | 8 | 9 | 16 |
|---|---|---|---|---|---|---|---|
| as stored, `x @ W.T` | 29 | 53 | 58 | 63 | 65 | 79 | 86 |
| as stored, `(W @ x.T).T` | 30 | 40 | 42 | 54 | 71 | 86 | 85 |
| by column, layers with one input merged | 25 | 37 | 51 | 60 | 64 | 73 | 84 |
| packed by oneDNN | 32 | 37 | 43 | 44 | 53 | 57 | 79 |
| packed by oneDNN, layers with one input merged | 28 | 31 | 37 | 41 | 50 | 51 | 73 |

With two threads 1, 4, 8 and 16 rows take 20, 26, 31 and 41 ms packed, and 22, 48, 52 and 58 by column. Reading them
from memory takes 25 ms.

On a CPU with AVX-512 packed and merged layers take 27, 33, 21, 22, 29, 30 and 41 ms in this table's order: one row and
two are padded to four there, with which they take 22. By column one row takes 25.
MKL's own packed weights took 65 ms for up to 8 rows, TF32 and bf16 need units that this CPU lacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from shared.engine.columns import by_column
from shared.engine.merged import Product, Run, names, take_over

Form = Literal["stored", "columns", "packed"]

_ROWS = (1, 2, 5, 9, 16)
"""One sequence, few, drafts of 4 and of 8 verified, many."""
_SAMPLE = 12 << 20
"""Numbers in the weights measured: more than caches hold. Smaller models are left alone."""
_WARM_UP = 6
"""Products before the clock starts: in a model of many layers the kernels' own code is in the cache."""
_REPEATS = 4
_PACKED_FOR = 8
"""Rows that oneDNN is told to pack for; what it does for 4 and 16 is the same."""
PADDED = 4
"""oneDNN's kernels for fewer rows can be slower than the one for these."""
_DEARER: dict[Form, float] = {"columns": 1.03, "packed": 1.05}
"""Weights as stored are mapped from the model's file. By column they are mapped too, from a file in the cache folder;
packed ones are a private copy of each process."""

Times = dict[tuple[str, int], float]
"""Seconds of a way to multiply ("linear", "weight_first", "columns", "packed", "padded") with a number of rows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How weights are laid out.

    `weight_first`: use `(W @ x.T).T` for 2 to that many rows, where they are as stored. `padded`: rows of zeros are
    added to fewer than `PADDED` rows before they meet packed weights.
    """

    form: Form = "stored"
    weight_first: int = 0
    padded: bool = False


def choose(measured: Mapping[int, Times]) -> Choice:
    """The form that takes least time, every number of rows and of threads counting alike."""

    def cost(way: Callable[[int], str]) -> float:
        return sum(times[way(rows), rows] / times["linear", rows] for rows in _ROWS for times in measured.values())

    def stored(limit: int) -> float:
        return cost(lambda rows: "weight_first" if 1 < rows <= limit else "linear")

    limits = [following - 1 for following in _ROWS[1:]] + [_ROWS[-1]]
    best = min(limits, key=stored)
    weight_first = best if best > 1 else 0
    choices = {Choice("stored", weight_first): stored(best)}

    def has(way: str) -> bool:
        return all((way, _ROWS[0]) in times for times in measured.values())

    if has("columns"):
        choices[Choice("columns", weight_first)] = _DEARER["columns"] * cost(lambda rows: "columns")
    if has("packed"):
        choices[Choice("packed")] = _DEARER["packed"] * cost(lambda rows: "packed")
    if has("padded"):
        padded = cost(lambda rows: "padded" if rows < PADDED else "packed")
        choices[Choice("packed", padded=True)] = _DEARER["packed"] * padded
    return min(choices, key=lambda choice: choices[choice])


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


def arrange(module: Any, runs: Sequence[Run], digest: str = "", threads: Collection[int] = ()) -> Choice:
    """Put the linear layers of a model on the CPU, seen in `runs`, into their fastest form.

    `digest` names the model's weights; without one weights by column are not shared with other processes. `threads`:
    how many will be used, now as many, now so many; none: as many as there are.
    """
    head = module.get_output_embeddings()
    inner = [run for run in runs if head not in run.layers]
    sample = _sample(inner)
    if not sample:
        return Choice()
    with torch.inference_mode():
        choice = choose(_over(threads or {torch.get_num_threads()}, sample))
    columns = {}
    if choice.form == "columns":
        columns = dict(zip(inner, by_column(digest, dict(zip(names(module, inner), inner, strict=True))), strict=True))
    for run in runs:
        if product := _product(run, choice, columns.get(run)):
            take_over(run, product)
    if choice.form != "packed" and choice.weight_first:
        # The output layer mostly shares its weights with the embedding, which needs them as stored.
        for run in [Run((head,))] if choice.form == "columns" else runs:
            for layer in run.layers:
                if type(layer) is nn.Linear:
                    WeightFirstLinear.take_over(layer, choice.weight_first)
    return choice


def _product(run: Run, choice: Choice, by_column: Tensor | None) -> Product | None:
    """None for layers that stay as they are."""
    if choice.form != "packed":
        return None if by_column is None else column_product(by_column, run.bias())
    packed = packed_product(run.weight(), run.bias())
    return padded_product(packed) if choice.padded else packed


def column_product(weight: Tensor, bias: Tensor | None) -> Product:
    """`weight` [out, in], best stored column by column."""
    return lambda x: linear(x, weight, bias)


def weight_first_product(weight: Tensor) -> Product:
    return lambda x: (weight @ x.t()).t().contiguous()


def packed_product(weight: Tensor, bias: Tensor | None) -> Product:
    """`weight` [out, in] is copied into blocks of oneDNN's choice."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    none: list[Any] = []
    return lambda x: multiply(x, packed, bias, "none", none, "")


def padded_product(product: Product) -> Product:
    """`product` of at least `PADDED` rows; what is added is cut off again."""
    return lambda x: product(x) if len(x) >= PADDED else product(pad(x, (0, 0, 0, PADDED - len(x))))[: len(x)]


def _packing() -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _sample(runs: Sequence[Run]) -> list[Run]:
    """The first runs, enough of them for their weights not to fit into caches; none if there are not so many."""
    total = 0
    for count, run in enumerate(runs, 1):
        total += sum(layer.weight.numel() for layer in run.layers)
        if total >= _SAMPLE:
            return list(runs[:count])
    return []


def _ways(run: Run) -> dict[str, list[Product]]:
    """What to call for the layers of `run`, in each way."""
    stored = [layer.weight.detach() for layer in run.layers]
    ways = {
        "linear": [column_product(weight, None) for weight in stored],
        "weight_first": [weight_first_product(weight) for weight in stored],
        "columns": [column_product(run.weight().t().contiguous().t(), None)],
    }
    if _packing():
        ways["packed"] = [packed_product(run.weight(), None)]
        ways["padded"] = [padded_product(product) for product in ways["packed"]]
    return ways


def _over(threads: Collection[int], runs: Sequence[Run]) -> dict[int, Times]:
    """By each of these numbers of threads."""
    before = torch.get_num_threads()
    found = {}
    try:
        for count in threads:
            torch.set_num_threads(count)
            found[count] = _measure(runs)
    finally:
        torch.set_num_threads(before)
    return found


def _measure(runs: Sequence[Run]) -> Times:
    made = [(run.layers[0].in_features, _ways(run)) for run in runs]
    times: Times = {}
    for _ in range(_REPEATS):  # outermost, so that a busy neighbour slows all ways alike
        for rows in _ROWS:
            inputs = {size: torch.ones(rows, size) for size, _ in made}
            for way in made[0][1]:
                if way == "padded" and rows >= PADDED:
                    continue  # the same as packed
                products = [(product, inputs[size]) for size, ways in made for product in ways[way]]
                for product, given in products[:_WARM_UP]:
                    product(given)
                begin = time.thread_time()  # not the clock on the wall: neighbours would be measured too
                for product, given in products:
                    product(given)
                seconds = time.thread_time() - begin
                times[way, rows] = min(seconds, times.get((way, rows), seconds))
    return times
