"""The right text, by plain `transformers`: is each token the one its greedy search would have taken?

The prompt and the answer are run through the unmodified model in one pass. If at every position the most likely
token is the answer's, greedy search gives this very answer. Where it is not, the two best must be nearly equal:
rounding differs between a batch of one and a batch of many, and decides between equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from shared.messages import Sampling
from shared.sampling.filters import candidates
from shared.sampling.noise import gumbel

MARGIN = 1e-3


@dataclass(frozen=True)
class Divergence:
    """At `index` of the answer the reference prefers another token, by `margin` (of logits, or of noisy ones)."""

    index: int
    margin: float


class Gold:
    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def divergences(
        self, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling | None = None, seed: int = 0
    ) -> list[Divergence]:
        """Positions where the reference would have taken another token."""
        ids = torch.tensor([[*prompt, *answer]])
        logits = self._model(ids).logits[0, len(prompt) - 1 : -1].float()
        found = []
        for index, (row, token) in enumerate(zip(logits, answer, strict=True)):
            scores = self._scores(row, sampling, seed, len(prompt) + index)
            margin = float(scores.max() - scores[token])
            if margin > 0:
                found.append(Divergence(index, margin))
        return found

    def _scores(self, row: torch.Tensor, sampling: Sampling | None, seed: int, position: int) -> torch.Tensor:
        """What the choice is the largest of: logits, or with a temperature the kept ones plus the position's noise."""
        if sampling is None or sampling.temperature == 0:
            return row
        kept, scaled = candidates(row, sampling)
        scores = torch.full_like(row, float("-inf"))
        scores[kept] = scaled.float() + gumbel(seed, position, kept).float()
        return scores


def check(divergences: Sequence[Divergence], what: str) -> None:
    """Fails for any divergence that rounding does not explain; tells of the others."""
    for divergence in divergences:
        print(f"near-tie in {what}: token {divergence.index}, margin {divergence.margin:.2e}")
    wrong = [d for d in divergences if d.margin >= MARGIN]
    assert not wrong, f"{what}: not the text of the reference: {wrong}"
