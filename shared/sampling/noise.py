"""Gumbel noise as a pure function of (seed, position, token id).

Adding independent standard Gumbel noise to log-probabilities and taking the argmax draws from the distribution
(Gumbel 1954; "Gumbel-max trick"). Because the noise is a function and not a stream, a target and a drafter that
share a seed draw the same token whenever their distributions are close (Daliri et al. 2024, "Coupling without
communication and drafter-invariant speculative decoding"), and a request can go on elsewhere after a crash.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; Random123):

    key     = (seed mod 2^32, seed div 2^32)                the seed as an unsigned 64-bit number
    counter = (token_id div 4, position mod 2^32, position div 2^32, STREAM)
    word    = output[token_id mod 4]
    u       = (word + 0.5) / 2^32                           in (0, 1), never 0 or 1
    G       = -log(-log(u))                                 between -3.13 and MAX_GUMBEL (22.9)

`u` and `G` are float64: in float32 the largest words would round to u = 1 and to infinite noise, and a difference of
one unit in the last place between two devices' logarithms would change tokens a billion times more often. In Triton,
`tl.philox(seed, c0, c1, c2, c3)` gives the same four words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
STREAM = 0x54524E45
"""Last counter word of all sampling noise; another use of the same seed must take another one."""

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
MAX_GUMBEL = -math.log(-math.log1p(-(2.0**-33))) + 1e-6
"""No noise is larger than this (u = 1 - 2^-33, and a margin for rounding)."""

Word = int | Tensor


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10. Words are unsigned 32-bit numbers, as ints or in int64 tensors that broadcast against each other.

    Products wrap in int64, which keeps all 64 bits: the low word by masking, the high word by shifting and masking.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1 ^ k0) & MASK32
        c2 = ((p0 >> 32) ^ c3 ^ k1) & MASK32
        c1, c3 = p1 & MASK32, p0 & MASK32
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Noise of these tokens: float64, the shape and device of `token_ids` (int64, 0 .. 2^31 - 1).

    A token's noise does not depend on which other tokens are asked about. `seed` is any signed or unsigned 64-bit
    number; `position` is the index of the token to be chosen, prompt included.
    """
    if token_ids.numel() == 0:
        return torch.empty_like(token_ids, dtype=torch.float64)
    span = int(token_ids.max()) + 1
    if token_ids.numel() * 4 > span:  # one evaluation gives four neighbours, so the whole row is cheaper
        return gumbel_rows([seed], [position], span, token_ids.device)[0][token_ids]
    words = torch.stack(_words(seed, position, token_ids >> 2))
    return _to_gumbel(words.gather(0, (token_ids & 3).unsqueeze(0))[0])


def gumbel_rows(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device | None = None
) -> Tensor:
    """Noise of the whole vocabulary for several (seed, position): float64 [len(seeds), vocab]."""
    blocks = torch.arange((vocab + 3) // 4, device=device)
    rows = [
        _to_gumbel(torch.stack(_words(seed, position, blocks), dim=-1).flatten()[:vocab])
        for seed, position in zip(seeds, positions, strict=True)
    ]
    return torch.stack(rows) if rows else torch.empty((0, vocab), dtype=torch.float64, device=device)


def gumbel_each(seeds: Sequence[int], positions: Sequence[int], token_ids: Tensor) -> Tensor:
    """Noise of some tokens for each of several (seed, position): float64, the shape of `token_ids` (int64, on the CPU,
    [len(seeds), tokens]). For a few hundred at a time, where numpy's operations cost half of torch's."""
    asked: Any = token_ids.numpy()
    key: Any = np.array([_key(seed) for seed in seeds])[:, :, None]
    counter: Any = np.array([_counter(0, position) for position in positions])[:, :, None]
    words: Any = philox4x32((asked >> 2, counter[:, 1], counter[:, 2], counter[:, 3]), (key[:, 0], key[:, 1]))
    return _to_gumbel(torch.from_numpy(np.choose(asked & 3, words)))


def gumbel_of(seed: int, position: int, token_id: int) -> float:
    """Noise of one token without torch's overhead, right up to the last digits of the logarithms."""
    word = philox4x32(_counter(token_id >> 2, position), _key(seed))[token_id & 3]
    return -math.log(-math.log((int(word) + 0.5) * 2.0**-32))


def _words(seed: int, position: int, blocks: Tensor) -> list[Tensor]:
    return [torch.as_tensor(word) for word in philox4x32(_counter(blocks, position), _key(seed))]


def _counter(blocks: Word, position: int) -> tuple[Word, Word, Word, Word]:
    return blocks, position & MASK32, position >> 32 & MASK32, STREAM


def _key(seed: int) -> tuple[int, int]:
    seed &= MASK64
    return seed & MASK32, seed >> 32


def _to_gumbel(words: Tensor) -> Tensor:
    return words.double().add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_()
