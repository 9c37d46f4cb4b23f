"""One request's tokens and KV blocks inside a decode worker. Plain data, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.cache import naming
from shared.cache.frames import BlockMeta
from shared.engine.span import Span
from shared.lifecycle import Phase
from shared.messages import Sampling


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and generated tokens, and how much of their KV exists.

    Invariants: `computed` positions of `tokens` have their KV in `table`; before a step of a sequence that is
    generating, exactly the last token's KV is missing. `names[i]` names the full block `table[i]`. `epoch` changes
    whenever the blocks are given up: whoever waited for something to write into them must compare it first.
    """

    id: str
    tokens: list[int]
    prompt_len: int
    root: bytes
    max_tokens: int
    """Most completion tokens, those of an earlier attempt included."""
    sampling: Sampling
    seed: int
    priority: int = 1
    arrival: int = 0
    phase: Phase = Phase.WAITING
    computed: int = 0
    table: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    epoch: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in a cache when the request was first admitted; None before."""

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed. 1 means: generating."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def generating(self) -> bool:
        return self.phase is Phase.READY and self.remaining == 1

    def meta(self, index: int, block_size: int) -> BlockMeta:
        """What the shared cache is told of this sequence's full block `index`."""
        parent = self.names[index - 1] if index else self.root
        tokens = tuple(self.tokens[index * block_size : (index + 1) * block_size])
        return BlockMeta(self.names[index], parent, tokens)

    def name_blocks(self, count: int, block_size: int) -> None:
        """Make sure that the first `count` full blocks have names."""
        while len(self.names) < count:
            start = len(self.names) * block_size
            parent = self.names[-1] if self.names else self.root
            self.names.append(naming.child(parent, self.tokens[start : start + block_size]))


@dataclass(frozen=True, slots=True)
class Work:
    """What one sequence does in one step: `span` ends with `drafts` tokens that are only guesses."""

    sequence: Sequence
    span: Span
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step brought a sequence: new tokens (the last `1` of them never drafted), and blocks that became full."""

    sequence: Sequence
    tokens: tuple[int, ...] = ()
    drafted: int = 0
    accepted: int = 0
    filled: range = range(0)
