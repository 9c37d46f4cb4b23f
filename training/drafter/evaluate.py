"""Judges a released drafter on conversations about topics that it was not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from training.drafter.acceptance import Acceptance, turns
from training.drafter.corpus import agreement
from training.drafter.model import Drafter
from training.drafter.prompts import Prompt
from training.drafter.shards import Conversation
from training.drafter.target import device
from training.drafter.vocabulary import Vocabulary

_BATCH_TOKENS = 4096


def judged(drafter: Drafter, prompts: Sequence[Prompt], talks: Sequence[Conversation]) -> dict[str, Any]:
    """By kind of prompt, and of "all": `Acceptance` of greedy answers, agreement at the other temperatures, and the
    share of the target's most likely tokens that can be proposed at all. Kinds without greedy answers are left out."""
    where = device()
    agreed = agreement(drafter.to(where).eval(), talks, _BATCH_TOKENS, where)
    kinds = sorted({prompt.kind for prompt in prompts})
    groups = {kind: [i for i, prompt in enumerate(prompts) if prompt.kind == kind] for kind in kinds}
    groups["all"] = list(range(len(prompts)))
    found = {kind: _group(members, prompts, talks, agreed, drafter.vocabulary) for kind, members in groups.items()}
    return {kind: result for kind, result in found.items() if result}


def _group(
    members: Sequence[int],
    prompts: Sequence[Prompt],
    talks: Sequence[Conversation],
    agreed: Sequence[np.ndarray],
    vocabulary: Vocabulary,
) -> Mapping[str, Any] | None:
    greedy = [i for i in members if prompts[i].temperature == 0]
    warm = [agreed[i] for i in members if prompts[i].temperature > 0]
    answers = [answer for i in greedy for answer in turns(talks[i].scored, agreed[i])]
    if not sum(map(len, answers)):
        return None
    firsts = np.concatenate([talks[i].top_ids[:, 0] for i in members])
    return {
        "greedy": asdict(Acceptance.of(answers)),
        "agreement_when_sampled": float(np.concatenate(warm).mean()) if sum(map(len, warm)) else None,
        "coverage": float((vocabulary.own(firsts) >= 0).mean()),
    }
