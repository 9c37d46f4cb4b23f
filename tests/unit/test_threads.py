"""How torch's threads are told to wait."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from shared.engine.threads import openmp
from shared.errors import ModelError
from shared.worker import in_passing_thread

SPIN = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}


def test_threads_turn_for_a_while_and_then_sleep() -> None:
    assert openmp(2, {}) == {"OMP_NUM_THREADS": "2", **SPIN}
    assert openmp(0, {}) == SPIN


def test_what_somebody_chose_stays() -> None:
    assert openmp(2, {"OMP_NUM_THREADS": "1"}) == SPIN
    for chosen in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"):
        assert openmp(2, {chosen: "as somebody likes"}) == {"OMP_NUM_THREADS": "2"}


def test_workers_import_torch_only_after_it_is_said() -> None:
    """OpenMP reads its environment when torch is imported, and `shared.worker.main` is called after these imports."""
    check = (
        "import sys, services.decode.__main__, services.prefill.__main__, services.drafter.__main__; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], env=dict(os.environ), timeout=60, check=False).returncode == 0


@pytest.mark.anyio
async def test_what_loads_a_model_leaves_no_thread_behind() -> None:
    """Its OpenMP team would be counted as long as it lives."""
    loader = await in_passing_thread(threading.current_thread)
    assert loader is not threading.main_thread() and not loader.is_alive()
    with pytest.raises(ModelError, match="no such model"):
        await in_passing_thread(_fail)


def _fail() -> None:
    raise ModelError("no such model")
