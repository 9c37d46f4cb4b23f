"""Whether two answers are the same text, and whether a text goes round in circles.

Drafts are verified several positions in one pass, and rounding differs between a pass over one position and a pass
over many. So two answers may part where the two best tokens are nearly equal, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.speculation_fleet import Pair
from shared.engine.engine import Engine
from shared.engine.span import Span
from shared.sampling.noise import gumbel_rows
from shared.tokenizer import Tokenizer

NEARLY = 1e-3
"""Of logits divided by the temperature, and with noise where there is any."""
GRAM = 8


@dataclass(frozen=True, slots=True)
class Parting:
    """Two answers part at token `index`; one of theirs is `margin` worse than the best there. None: one has ended."""

    pair: Pair
    index: int
    margin: float | None

    @property
    def tie(self) -> bool:
        return self.margin is not None and self.margin < NEARLY


def parted(some: Sequence[int], others: Sequence[int]) -> int | None:
    """Index of the first token that only one of them has there; None if they are the same."""
    if some == others:
        return None
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))


def compare(tokenizer: Tokenizer, folder: Path, pairs: Sequence[Pair]) -> tuple[dict[str, Any], list[Parting]]:
    """A row of the results, and where answers part. Loads the model if any do."""
    indices = [parted(pair.drafted.token_ids, pair.plain.token_ids) for pair in pairs]
    engine: Engine | None = None
    found = []
    for pair, index in zip(pairs, indices, strict=True):
        if index is not None:
            engine = engine or Engine.load(folder, kv_memory_mb=256, threads=1)
            found.append(Parting(pair, index, _margin(engine, tokenizer, pair, index)))
    row = {
        "answers": len(pairs),
        "parted": len(found),
        "parted_not_at_a_tie": sum(not p.tie for p in found),
        "largest_margin": max((p.margin for p in found if p.margin is not None), default=0.0),
    }
    return row, found


def _margin(engine: Engine, tokenizer: Tokenizer, pair: Pair, index: int) -> float | None:
    answers = (pair.drafted.token_ids, pair.plain.token_ids)
    if index == min(map(len, answers)):
        return None
    tokens = (*tokenizer.chat(pair.chat.messages), *answers[0][:index])
    table = tuple(range(-(-len(tokens) // engine.info.block_size)))
    scores = engine.forward([Span(tokens, 0, table, 1)])[0].double()
    if pair.how.temperature:
        scores = scores / pair.how.temperature + gumbel_rows([pair.how.seed], [len(tokens)], len(scores))[0]
    chosen = torch.tensor([answer[index] for answer in answers])
    return float(scores.max() - scores[chosen].min())


def repeated(tokens: Sequence[int]) -> float:
    """The share of all runs of `GRAM` tokens that came earlier in the same text. In loops drafting is too easy."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
