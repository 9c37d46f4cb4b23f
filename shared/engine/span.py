"""One sequence's share of a forward pass. No torch: schedulers build spans."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages import Sampling
from shared.sampling.adjustments import Adjustments
from shared.sampling.guide import Masks


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `token_ids` at positions `start, start+1, ...` of a sequence whose KV lives in `table`'s blocks.

    `table[i]` holds positions `i*block_size ...`; it must cover `start + len(token_ids)` positions, and positions
    below `start` must have been computed or loaded before. `rows` asks for that many next tokens: those after the
    last `rows` tokens of the span (0: none, the KV is all that is wanted). `seed`, `sampling` and `adjustments` choose
    them. The last `guesses` tokens are some that the adjustments were not told to take; a row sees those up to its own.
    `logprobs`: report log-probabilities, also those of so many most likely tokens. `hidden`: report the hidden
    states that the rows' tokens are chosen from. `masks`: one for each row, of the tokens that may be chosen.

    `slot` is the sequence's own, from its first span to its last, and below `ModelInfo.slots`: with a KV codec that
    seals whole blocks the engine keeps the keys of the unfull block there.
    """

    token_ids: tuple[int, ...]
    start: int
    table: tuple[int, ...]
    rows: int = 0
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    slot: int = 0
    adjustments: Adjustments | None = None
    guesses: int = 0
    logprobs: int | None = None
    hidden: bool = False
    masks: Masks | None = field(default=None, compare=False)
