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

GNU's OpenMP turns no more than 1,000 times once a process has more threads than there are cores, which each further
thread that calls torch brings about (the one that loads the model, say), unless the policy is ACTIVE: 46 instead of 57
ms for four sequences. It then goes by GOMP_SPINCOUNT in either case.
"""

from __future__ import annotations

from collections.abc import Mapping

_SPIN = "10000"
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def openmp(threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to `environment`, for `threads` threads (0: as many as OpenMP likes).

    What somebody has chosen stays: any say about how threads wait keeps ours out.
    """
    added = {"OMP_NUM_THREADS": str(threads)} if threads and "OMP_NUM_THREADS" not in environment else {}
    if not any(name in environment for name in _WAITING):
        # GNU's and Intel's OpenMP, whichever torch has
        added |= {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": _SPIN, "KMP_BLOCKTIME": "0"}
    return added
