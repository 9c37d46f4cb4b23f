"""Conversations as what a drafter is trained and judged on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from training.drafter.loss import Thoughts, agrees
from training.drafter.model import Drafter
from training.drafter.packing import Packed, plan
from training.drafter.shards import Conversation
from training.drafter.vocabulary import Vocabulary


def batch(
    talks: Sequence[Conversation], vocabulary: Vocabulary, device: torch.device
) -> tuple[Packed, Tensor, Thoughts]:
    """The conversations in one row; which of its tokens the target's thoughts follow, int64 [r]; and these thoughts."""
    packed = Packed.of([talk.tokens for talk in talks], device)
    lengths = np.array([len(talk.tokens) for talk in talks])
    begins = np.cumsum(lengths) - lengths
    rows = np.concatenate([talk.scored + begin for talk, begin in zip(talks, begins, strict=True)]).astype(np.int64)
    ids = vocabulary.own(np.concatenate([talk.top_ids for talk in talks]))
    logp = np.concatenate([talk.top_logp for talk in talks]).astype(np.float32)
    moved = [torch.from_numpy(array).to(device) for array in (rows, ids, logp)]
    return packed, moved[0], Thoughts(moved[1], moved[2])


@torch.no_grad()
def agreement(
    drafter: Drafter, talks: Sequence[Conversation], batch_tokens: int, device: torch.device
) -> list[np.ndarray]:
    """Of each conversation, at each scored position: whether the drafter's most likely token is the target's."""
    results: list[np.ndarray] = [np.zeros(0, bool)] * len(talks)
    for members in plan([len(talk.tokens) for talk in talks], batch_tokens, 1, 0):
        chosen = [talks[i] for i in members]
        packed, rows, thoughts = batch(chosen, drafter.vocabulary, device)
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            agreed = agrees(drafter(packed, rows), thoughts).cpu().numpy()
        cuts = np.cumsum([len(talk.scored) for talk in chosen])[:-1]
        for i, part in zip(members, np.split(agreed, cuts), strict=True):
            results[i] = part
    return results
