"""How far a draft head is from its target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_LEAST = 1e-6
"""No probability is taken to be smaller than this where its logarithm is needed."""


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The target's distribution at some positions: `ids` [r, k] in the head's vocabulary (-1: not in it), most
    likely first, with their log-probabilities `logp` [r, k] over the target's whole vocabulary (float32)."""

    ids: Tensor
    logp: Tensor


def distillation(guessed: Tensor, thoughts: Thoughts, hard: float) -> Tensor:
    """Of each position `(1 - hard)` KL divergence and `hard` cross-entropy, in nats: [r].

    `guessed` [r, proposable]: the head's log-probabilities. The divergence is that between distributions over k + 1
    events: each kept token that can be proposed, and anything else (the tail). Kept tokens that cannot be proposed are
    no fault of the head's: their probability is taken out, the rest is renormalised, and the position counts for as
    much as is left. The cross-entropy is on the target's most likely token, where it can be proposed.
    """
    known = thoughts.ids >= 0
    logq = torch.where(known, guessed.gather(1, thoughts.ids.clamp(min=0)), 0.0)
    p_kept = thoughts.logp.exp()
    p_tail = (1 - p_kept.sum(-1)).clamp(min=0)
    p = torch.where(known, p_kept, 0.0)
    left = p.sum(-1) + p_tail
    q_tail = (1 - torch.where(known, logq.exp(), 0.0).sum(-1)).clamp(min=_LEAST)
    share = left.clamp(min=_LEAST)
    own = _xlogx(p / share[:, None]).sum(-1) + _xlogx(p_tail / share)
    cross = (p * logq).sum(-1) + p_tail * q_tail.log()
    divergence = share * own - cross
    cross_entropy = -logq[:, 0]  # 0 where it is not known
    return (1 - hard) * divergence + hard * cross_entropy


def likelihood(guessed: Tensor, own: Tensor) -> Tensor:
    """Probability of the tokens `own` [r], the head's ids, by log-probabilities `guessed` [r, proposable]; 0 for -1."""
    return torch.where(own >= 0, guessed.gather(1, own.clamp(min=0)[:, None])[:, 0].exp(), 0.0)


def _xlogx(x: Tensor) -> Tensor:
    return x * functional.threshold(x, 0.0, 1.0).log()
