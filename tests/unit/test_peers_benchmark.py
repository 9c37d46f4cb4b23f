"""The benchmarks beside peers: what they take from what they see, and what they say of who is best."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import interference, machine, peers
from benchmarks.interference import bars_of
from benchmarks.interference_streams import Window
from benchmarks.peers import compared
from benchmarks.peers_process import Missing, answering, process
from benchmarks.peers_servers import PEERS

NOWHERE = argparse.Namespace(vllm_python="/nowhere/python", llama_server="/nowhere/server", transformers_python="/none")


class TestWindow:
    window = Window(10.0, 20.0)

    def test_gaps_are_those_that_end_in_it(self) -> None:
        pieces = [8.0, 9.5, 10.5, 11.0, 19.9, 20.5]
        assert self.window.gaps(pieces) == pytest.approx([1.0, 0.5, 8.9])
        assert self.window.count(pieces) == 3

    def test_a_stream_that_stands_still_is_no_better_for_it(self) -> None:
        assert self.window.gaps([9.0, 9.5, 10.5, 11.0]) == pytest.approx([1.0, 0.5, 9.0])
        assert self.window.gaps([9.0]) == pytest.approx([11.0])
        assert self.window.gaps([]) == pytest.approx([10.0])


def test_of_a_row_the_best_is_named_also_when_it_is_a_peer() -> None:
    found = compared(
        {
            "Trine": {"batch_1": [20.0, 30.0, 10.0], "ttft_cold_ms": [100.0]},
            "vLLM": {"batch_1": [25.0, 24.0, 26.0], "ttft_cold_ms": [200.0]},
            "failed": {},
        }
    )
    assert found["batch_1"]["best"] == "vLLM" and found["ttft_cold_ms"]["best"] == "Trine"
    assert found["batch_1"]["servers"]["Trine"] == {"median": 20.0, "lowest": 10.0, "highest": 30.0}
    assert found["batch_1"]["trine_over"] == {"vLLM": 0.8} and "at_once_4" not in found


def row(p99: float, rate: float) -> dict[str, Any]:
    return {"itl_p99_ms": p99, "tokens_per_s": rate}


def test_the_bar_is_set_against_the_peer_with_the_lowest_p99_however_it_was_started() -> None:
    result = bars_of(
        {
            ("Trine", "tuned", 5.0): row(100, 50),
            ("Trine", "default", 5.0): row(1, 1),
            ("vLLM", "default", 5.0): row(400, 60),
            ("vLLM", "tuned", 5.0): row(200, 40),
            ("vLLM", "tuned", 1.0): row(200, 40),
        }
    )
    assert result["best_peers"] == {"every_5_s": "vLLM (tuned), every 5 s"}
    bars = result["bars"]
    assert (bars["p99_ratio_every_5_s"]["value"], bars["rate_ratio_every_5_s"]["value"]) == (0.5, 1.25)
    assert all(bar["passed"] for bar in bars.values())
    assert bars_of({("Trine", "tuned", 5.0): row(1, 1)}) == {"best_peers": {}, "bars": {}}


@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_peer_that_is_not_there_is_left_out_by_name(name: str) -> None:
    with pytest.raises((Missing, OSError)), PEERS[name]("default", NOWHERE):
        raise AssertionError("it was started")


def test_a_server_that_ends_at_start_is_left_out_with_its_last_words() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('there is no such model')"]
    with process(command, {}) as (pid, said), pytest.raises(Missing, match="there is no such model"):
        answering("http://127.0.0.1:1/health", pid, said)


def test_a_server_ends_with_its_children() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input(); print(1)'], stdin=subprocess.PIPE)"
    with process([sys.executable, "-c", child], {}) as (pid, _):
        while not (family := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            pass
    deadline = time.monotonic() + 5
    while machine.family([int(family[0])]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert machine.family([int(family[0])]) == []


def test_tables_show_what_was_left_out() -> None:
    machine = {"cpu": "x", "cores": 2, "memory_gb": 1, "system": "s", "python": "3", "load_average_before": 0.0}
    common = {"machine": machine, "servers": [], "rows": {}}
    assert "vllm: left out: not here" in peers.table({**common, "missing": {"vllm": "not here"}, "failed": {}})
    shown = interference.table({**common, "left_out": {"vllm": "not here"}, "best_peers": {}, "bars": {}})
    assert "vllm: left out: not here" in shown
