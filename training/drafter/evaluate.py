"""Judges a released head on conversations about topics that it was not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from training.drafter.acceptance import DEPTHS, tokens_per_step
from training.drafter.chains import Chains, drafted
from training.drafter.corpus import Corpus
from training.drafter.model import DraftHead
from training.drafter.prompts import Prompt
from training.drafter.shards import Conversation

EDGES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Of the ranges of confidence."""


def judged(
    head: DraftHead, prompts: Sequence[Prompt], talks: Sequence[Conversation], corpus: Corpus
) -> tuple[dict[str, Any], dict[str, Any]]:
    """By kind of prompt, and of "all": how greedy answers are drafted (`agreement` by depth, each given that those
    before came true, and `tokens_per_step`), `agreement_when_sampled` of the first draft at the other temperatures, and
    `coverage`, the share of the target's most likely tokens that can be proposed at all. Kinds without greedy answers
    are left out. And the calibration of first and of later drafts, greedy answers of all kinds together.

    `corpus` is of `talks`, the answers to `prompts`.
    """
    chains = drafted(head, corpus, max(DEPTHS))
    of_row = np.repeat(np.arange(len(talks)), [len(talk.scored) for talk in talks])
    greedy = np.array([prompt.temperature == 0 for prompt in prompts])
    kinds = {kind: np.array([p.kind == kind for p in prompts]) for kind in sorted({p.kind for p in prompts})}
    kinds["all"] = np.ones(len(prompts), bool)
    found = {kind: _kind(members, greedy, of_row, chains, corpus) for kind, members in kinds.items()}
    cold = chains.of(greedy[of_row[chains.rows]])
    calibration = {"first": cold.calibration([1], EDGES), "later": cold.calibration(list(DEPTHS)[1:], EDGES)}
    return {kind: result for kind, result in found.items() if result}, calibration


def _kind(
    members: np.ndarray, greedy: np.ndarray, of_row: np.ndarray, chains: Chains, corpus: Corpus
) -> Mapping[str, Any] | None:
    talk = of_row[chains.rows]
    cold, warm = chains.of((members & greedy)[talk]), chains.of((members & ~greedy)[talk])
    if not len(cold.rows):
        return None
    answers = np.split(cold.true, np.flatnonzero(np.diff(cold.rows) != 1) + 1)
    return {
        "positions": len(cold.rows),
        "agreement": cold.agreement(),
        "tokens_per_step": tokens_per_step(answers),
        "agreement_when_sampled": warm.agreement().get(1),
        "coverage": float((corpus.ids[members[of_row], 0] >= 0).mean()),
    }
