"""Linear layers that read the same input, computed by one product: query, key and value; gate and up.

Which layers these are is seen in a pass over the model and not told by their names. A layer asked for something else
than what it was seen with computes its group's product anew, so that the answer never rests on the observation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]
"""[rows, in] → [rows, out], for at least one row."""


@dataclass(frozen=True)
class Run:
    """Linear layers that were called one after the other on the same tensor."""

    layers: tuple[nn.Linear, ...]

    @property
    def sizes(self) -> list[int]:
        return [layer.out_features for layer in self.layers]

    def weight(self) -> Tensor:
        """[sum of sizes, in]; a copy if there are several layers."""
        weights = [layer.weight.detach() for layer in self.layers]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def bias(self) -> Tensor | None:
        """[sum of sizes], zero for layers without one; None if there is none at all."""
        if all(layer.bias is None for layer in self.layers):
            return None
        return torch.cat(
            [
                layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
                for layer in self.layers
            ]
        )


@dataclass
class Watch:
    """The calls of linear layers during one pass, in their order."""

    calls: list[tuple[nn.Linear, Tensor]] = field(default_factory=list)

    def runs(self) -> list[Run]:
        """The layers that were called once, in the order of the calls."""
        times = Counter(layer for layer, _ in self.calls)
        runs: list[Run] = []
        previous: Tensor | None = None
        for layer, given in self.calls:
            if times[layer] > 1:
                previous = None
            elif given is previous:
                runs[-1] = Run((*runs[-1].layers, layer))
            else:
                runs.append(Run((layer,)))
                previous = given
        return runs


@contextmanager
def watching(module: nn.Module) -> Iterator[Watch]:
    """Note the calls of the linear layers of `module` in the last pass made within."""
    watch = Watch()

    def restart(_: nn.Module, __: Any) -> None:
        watch.calls.clear()

    def note(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        if given:  # the tensor is kept, or a later one might get its address
            watch.calls.append((layer, given[0]))

    hooks = [layer.register_forward_pre_hook(note) for layer in module.modules() if type(layer) is nn.Linear]
    hooks.append(module.register_forward_pre_hook(restart))
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


class Shared:
    """The product of a run. Its first layer computes it whole, the others take their part."""

    def __init__(self, product: Product, run: Run) -> None:
        self.product, self._sizes = product, run.sizes
        self._features = run.layers[0].in_features
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []
        self._left = 0

    @property
    def count(self) -> int:
        """Of layers."""
        return len(self._sizes)

    def part(self, index: int, given: Tensor) -> Tensor:
        """What layer `index` of the run gives for `given` [..., in]."""
        if self._left and self._input is given and (part := self._parts[index]) is not None:
            self._take(index)
            return part
        rows = given.numel() // self._features
        if not rows:
            return given.new_empty(*given.shape[:-1], self._sizes[index])
        out = self.product(given.reshape(rows, self._features)).view(*given.shape[:-1], -1)
        if len(self._sizes) == 1:
            return out
        parts = out.split_with_sizes(self._sizes, dim=-1)
        self._input, self._left, self._parts = given, len(parts), [*parts]
        self._take(index)
        return parts[index]

    def _take(self, index: int) -> None:
        self._parts[index] = None
        self._left -= 1
        if not self._left:
            self._input = None  # nothing is kept alive from one step to the next


class PartLinear(nn.Linear):
    """A linear layer whose numbers come from its run's product. Its own weight is let go; the shape stays."""

    shared: Shared
    index: int

    def forward(self, input: Tensor) -> Tensor:
        return self.shared.part(self.index, input)


def take_over(run: Run, product: Product) -> None:
    """Let `product`, of the run's weights one above the other, do the work of the run's layers."""
    shared = Shared(product, run)
    for index, layer in enumerate(run.layers):
        layer.__class__ = PartLinear
        vars(layer).update(shared=shared, index=index)
        layer.weight = nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)


def product_of(*layers: nn.Module) -> Product | None:
    """What computes all of these at once, if they are one run, in its order."""
    parts = [layer for layer in layers if isinstance(layer, PartLinear)]
    shared = {part.shared for part in parts}
    if len(parts) < len(layers) or len(shared) != 1:
        return None
    (of_all,) = shared
    return of_all.product if [part.index for part in parts] == list(range(of_all.count)) else None


def names(module: nn.Module, runs: Sequence[Run]) -> list[str]:
    """A name for each run, of its layers' names in `module`."""
    known = {layer: name for name, layer in module.named_modules()}
    return ["+".join(known[layer] for layer in run.layers) for run in runs]
