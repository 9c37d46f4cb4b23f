"""An engine runs each step with as many threads as there are cores for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from shared.cores import Cores
from shared.engine.engine import Engine
from shared.engine.span import Span
from shared.messages import Sampling
from tests import tiny_models


class Told:
    """Says in turn how many cores there are."""

    most = 2

    def __init__(self, *counts: int) -> None:
        self.counts = list(counts)
        self.over = self.rests = 0

    def at_most(self, count: int) -> None:
        self.most = min(self.most, count)

    def rest(self) -> None:
        self.rests += 1

    @contextmanager
    def at_work(self) -> Iterator[int]:
        try:
            yield self.counts.pop(0)
        finally:
            self.over += 1


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_each_step_has_the_threads_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_models.write(tmp_path, tiny_models.ARCHITECTURES["llama"])
    told = Told(1, 2, 1, 3)
    engine = Engine.load(folder, block_size=4, kv_blocks=4, cores=cast(Cores, told), generates=False)
    seen: list[int] = []
    run = engine._runner.run

    def watched(spans: Any) -> Any:
        seen.append(torch.get_num_threads())
        return run(spans)

    monkeypatch.setattr(engine._runner, "run", watched)
    span = Span((1, 2, 3), 0, (0,), 1, 0, Sampling(temperature=0.0), slot=0)
    first = engine.step([span])
    engine.forward([span])
    assert engine.step([span]) == first
    assert seen == [2, 1, 3] and told.over == 4, "loading is work too"
    engine.rest()
    assert told.rests == 1
    assert engine.sibling("none", 4)._cores is engine._cores
