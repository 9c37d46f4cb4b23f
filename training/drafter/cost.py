"""What a draft token costs, in steps of the target: both as this project runs them, alone and taking turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from shared.engine.draft_head import DraftHead
from shared.engine.engine import Engine
from shared.engine.span import Span
from shared.sampling.fields import Sampling
from shared.sampling.params import Row
from training.drafter.target import Target

CONTEXT = 128
_ROUNDS, _BLOCK = 21, 16


def relative_cost(target: Target, release: Path) -> float:
    """Median over pairs of steps, one sequence of `CONTEXT` tokens each."""
    blocks = CONTEXT // _BLOCK + 2
    table = tuple(range(blocks))
    engine = Engine.load(target.folder, block_size=_BLOCK, kv_blocks=blocks, lookahead=0, generates=False)
    engine.forward([Span((0,) * CONTEXT, 0, table, 1)])
    head = DraftHead.load(release, target.folder)
    state = head.start([bytes(2 * target.hidden_size)])
    row = Row(Sampling(temperature=0.0), 0, CONTEXT)

    def whole() -> None:
        engine.step([Span((0,), CONTEXT, table, 1)])

    def small() -> None:
        head.step(state, [(0,) * head.info.window], [row])

    return median(_seconds(small) / _seconds(whole) for _ in range(_ROUNDS))


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
