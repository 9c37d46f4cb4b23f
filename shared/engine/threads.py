"""How torch's threads wait for each other. No torch: it has to be said before torch is imported.

By default OpenMP threads that wait for work spin. As soon as something else wants one of the cores, a thread spins
while the one that it waits for is not running, and a step that should take milliseconds takes many time slices.

Steps of SmolLM2-135M, 2 threads on 2 cores, GNU OpenMP, ms for one sequence / one with 4 drafts / eight sequences:

| GOMP_SPINCOUNT | default | 0 | 1,000 | 10,000 | 100,000 |
|---|---|---|---|---|---|
| nothing else runs | 52 / 60 / 72 | 62 / 75 / 92 | 59 / 71 / 91 | 43 / 52 / 66 | 46 / 57 / 74 |
| next to two busy processes | 198 / 292 / 386 | 124 / 152 / 204 | 76 / 94 / 144 | 90 / 117 / 142 | 110 / 138 / 169 |

Ten thousand turns span the small operations between two products, and are over long before a time slice is.
OMP_WAIT_POLICY=PASSIVE is about the same as 0.

That number counts only while a process has no more OpenMP threads than there are cores; beyond that it is 100, or
1,000 under the policy ACTIVE. Each thread that calls torch brings a team of its own, which stays as long as the thread
does. So models are loaded in threads that end (`shared.worker.in_passing_thread`), and the policy is ACTIVE for what is
left: with the loading thread alive four sequences took 57 ms, 46 under ACTIVE, and 44 with the team of the steps alone.
"""

from __future__ import annotations

from collections.abc import Mapping

_SPIN = "10000"
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def openmp(threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to `environment`, for `threads` threads (0: as many as OpenMP likes).

    What somebody has chosen stays: any say about how threads wait keeps ours out.
    """
    added = {"OMP_NUM_THREADS": str(threads)} if threads and "OMP_NUM_THREADS" not in environment else {}
    if not any(name in environment for name in _WAITING):
        # GNU's and Intel's OpenMP, whichever torch has
        added |= {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": _SPIN, "KMP_BLOCKTIME": "0"}
    return added
