"""A request's phases inside a worker, as a table. No I/O, no clock.

    WAITING ──> LOADING ──> READY ──> ENDED
       ^           │          │
       └───────────┴──────────┘   preempted: blocks given up, computed again or loaded later

Any phase may end (cancelled, failed, handed back).
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    WAITING = "waiting"
    """Has no blocks yet."""
    LOADING = "loading"
    """Has blocks; their contents are being fetched from the cache or computed by a prefill worker."""
    READY = "ready"
    """Takes part in steps: the rest of the prompt is computed here, then tokens are generated."""
    ENDED = "ended"


_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.LOADING, Phase.ENDED}),
    Phase.LOADING: frozenset({Phase.READY, Phase.WAITING, Phase.ENDED}),
    Phase.READY: frozenset({Phase.WAITING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


def advance(current: Phase, to: Phase) -> Phase:
    """`to`, if the table allows it; raises ValueError otherwise."""
    if to not in _NEXT[current]:
        raise ValueError(f"a request cannot go from {current.value} to {to.value}")
    return to
