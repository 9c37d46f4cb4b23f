"""Decisions about sampling that need no torch: clients, gateways and schedulers import this."""

from __future__ import annotations

import secrets

from shared.messages import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0: the noise could then only decide between logits closer than about 2e-4,
which is what two correct ways of computing the same logits differ by."""


def is_greedy(sampling: Sampling) -> bool:
    """True when the most likely token is always taken: the seed and the filters have no effect."""
    return sampling.temperature < GREEDY_BELOW


def draw_seed() -> int:
    """A seed for a request that gave none: 53 random bits, so that every JSON reader keeps it exactly."""
    return secrets.randbits(53)
