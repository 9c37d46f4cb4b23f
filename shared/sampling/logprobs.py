"""Log-probabilities of chosen tokens, for requests that want to see them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.sampling.device import moved
from shared.sampling.fields import MIN_LOGPROB, Logprob

DIGITS = 6
"""After the point. Float32 logits know no more."""


def logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int | None]) -> list[Logprob | None]:
    """Of each row of `logits` [rows, vocab] (float32): how likely the model finds `tokens[row]`, and its `tops[row]`
    most likely tokens. None for rows whose `tops` is None; if all are, nothing is computed.

    The logits are the model's own, with a finite maximum.
    """
    wanted = [i for i, top in enumerate(tops) if top is not None]
    out: list[Logprob | None] = [None] * len(tops)
    if not wanted:
        return out
    rows = logits[moved(torch.tensor(wanted), logits.device)]
    chosen = moved(torch.tensor([tokens[i] for i in wanted]), logits.device)
    total = rows.logsumexp(-1, keepdim=True)
    best = rows.topk(min(max(tops[i] or 0 for i in wanted), rows.shape[-1]), dim=-1)
    own = (rows.gather(-1, chosen[:, None]) - total).flatten().tolist()
    ids, values = best.indices.tolist(), (best.values - total).tolist()
    for n, i in enumerate(wanted):
        top = tops[i]
        out[i] = Logprob(
            logprob=_number(own[n]), top_ids=ids[n][:top], top_logprobs=[_number(v) for v in values[n][:top]]
        )
    return out


def _number(value: float) -> float:
    return min(round(max(value, MIN_LOGPROB), DIGITS), 0.0)
