"""Decisions about sampling that need no torch: clients, gateways and schedulers import this."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from shared.sampling.adjustments import Adjustments
from shared.sampling.fields import Sampling
from shared.sampling.guide import Masks

GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0: the noise could then only decide between logits closer than about 2e-4,
which is what two correct ways of computing the same logits differ by."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one row of logits becomes a token.

    `position` is the index of the token to choose in the whole sequence, prompt included: the number of tokens that
    stand before it. Target and drafter must count alike, or their noise differs and drafts are refused. `guessed` are
    the last of those tokens, as far as the `adjustments` were not told to take them. `mask`: a row of `guide.Masks`; no
    other token can be chosen.
    """

    sampling: Sampling
    seed: int
    position: int
    adjustments: Adjustments | None = None
    guessed: tuple[int, ...] = ()
    mask: Masks | None = field(default=None, compare=False)


def is_greedy(sampling: Sampling) -> bool:
    """True when the most likely token is always taken: the seed and the filters have no effect."""
    return sampling.temperature < GREEDY_BELOW


def seed_of(seq: int, stamp: int, data: bytes) -> int:
    """The seed of a request that gave none, from its place in the queue, its time (ns) there and its bytes.

    Every attempt at the request comes to the same one without being told. 53 bits: every JSON reader keeps it exactly.
    """
    digest = hashlib.blake2b(f"{seq}.{stamp}.".encode() + data, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11
