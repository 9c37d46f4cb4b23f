"""What the draft model has read and guessed of one session. Pure.

The guesses follow each other as if the target took every one of them. What it takes instead ends the chain at that
place, and the KV from there on is computed over: it is never read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from services.drafter.sources.adjusting import Adjusting
from services.drafter.sources.base import Wish
from shared.cache.naming import Lineage
from shared.messages import Sampling
from shared.sampling.adjustments import Adjustments


@dataclass(slots=True, eq=False)
class Chain:
    """`table` holds the KV of the first `computed` of `tokens[:length] + guesses`.

    Its first `len(names)` blocks hold only true tokens and are named: others may share them, so they are not written.
    There is always a token whose KV is missing, for a step to begin with.
    """

    lineage: Lineage
    tokens: list[int]
    sampling: Sampling
    length: int = 0
    guesses: list[int] = field(default_factory=list)
    computed: int = 0
    table: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    wish: Wish | None = None
    """The newest."""
    wanted: int = 0
    """Guesses that somebody waits for."""
    target: int = 0
    """Guesses after which it rests."""
    adjustments: Adjustments | None = None
    """They have taken all tokens generated and all guesses."""
    _true: Adjusting = field(default_factory=Adjusting)

    @property
    def missing(self) -> int:
        """Tokens that a step has to compute before there is another guess."""
        return self.length + len(self.guesses) - self.computed

    @property
    def waited_for(self) -> bool:
        return len(self.guesses) < self.wanted

    @property
    def resting(self) -> bool:
        return len(self.guesses) >= max(self.target, self.wanted)

    def ready(self, wish: Wish) -> list[int]:
        """The guesses that follow what the wish tells; none if the target took something else."""
        return self._agreed(wish)[1]

    def kept(self, wish: Wish) -> int:
        """How many of the wish's tokens need not be computed again."""
        return min(self.computed, self._agreed(wish)[0])

    def follow(self, wish: Wish) -> None:
        """Go on from what the wish tells. Blocks are as before, but for `blocks_to_leave`."""
        common, guesses = self._agreed(wish)
        self.computed = min(self.computed, common if guesses else min(common, wish.length - 1))
        self.tokens, self.length, self.guesses = wish.tokens, wish.length, guesses
        self.wish, self.sampling = wish, wish.sampling

    def adjust(self, wish: Wish, eos_ids: Collection[int]) -> None:
        """Bring the adjustments to where the guesses end. To be called after `follow`, with the same wish."""
        true = self._true.at(wish, eos_ids)
        self.adjustments = None if true is None else true.fork()
        if self.adjustments is not None:
            self.adjustments.take(self.guesses)

    def guess(self, tokens: Sequence[int]) -> None:
        """These are likely to come next."""
        self.guesses += tokens
        if self.adjustments is not None:
            self.adjustments.take(tokens)

    def blocks_to_leave(self, block_size: int) -> list[int]:
        """Blocks from which on the table is of no more use, taken out of it: named ones that would be written."""
        if len(self.names) * block_size <= self.computed:
            return []
        keep = self.computed // block_size
        leave, self.table, self.names = self.table[keep:], self.table[:keep], self.names[:keep]
        self.computed = keep * block_size
        return leave

    def step_tokens(self, most: int) -> list[int]:
        """The next tokens to compute."""
        end = min(self.computed + most, self.length + len(self.guesses))
        true = self.tokens[self.computed : min(end, self.length)]
        return true + self.guesses[max(self.computed - self.length, 0) : max(end - self.length, 0)]

    def _agreed(self, wish: Wish) -> tuple[int, list[int]]:
        """How many tokens of the chain are those of the wish, and the guesses that follow if all of the wish's are."""
        same = min(self.length, wish.length)
        if self.tokens is not wish.tokens:
            same = common_prefix(self.tokens[:same], wish.tokens[:same])
        if same < self.length:
            return same, []
        true = common_prefix(self.guesses, wish.tokens[self.length : wish.length])
        if same + true < wish.length:
            return same + true, []
        going_on = self.guesses[true:] if self.sampling == wish.sampling else []
        return same + (len(self.guesses) if going_on else true), going_on


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix, by comparing slices: much faster than token by token."""
    same, end = 0, min(len(a), len(b))  # [:same] is common; the answer is at most `end`
    while same < end:
        middle = (same + end + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same
