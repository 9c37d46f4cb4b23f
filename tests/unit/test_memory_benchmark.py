"""The memory benchmark's bar holds, for other loads than the one it prints too."""

from __future__ import annotations

import pytest

from benchmarks.memory import BAR, load, run


@pytest.mark.parametrize(("seed", "blocks"), [(1, 4096), (2, 300)])
def test_kv_waste_is_below_the_bar(seed: int, blocks: int) -> None:
    result = run(load(seed), blocks)
    assert result["waste"] < BAR
    assert result["waste_while_a_step_runs"] < BAR
    assert result["blocks_saved_by_sharing_mean"] > 0
    assert (result["preemptions"] > 0) == (blocks == 300)
