"""One request's tokens and KV blocks inside a decode worker. Plain data, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared import tracing
from shared.cache.frames import BlockMeta
from shared.cache.naming import Lineage
from shared.engine.span import Span
from shared.lifecycle import Phase
from shared.messages import Sampling
from shared.sampling.adjustments import Adjustments
from shared.sampling.fields import Logprob
from shared.sampling.guide import Guide

AGEING_PLANS = 256
"""A sequence that stood by for so many plans counts as one priority higher; after twice as many a low one is high."""
NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and generated tokens, and how much of their KV exists.

    Invariants: `computed` positions of `tokens` have their KV in `table`; before a step of a sequence that is
    generating, exactly the last token's KV is missing. `names[i]` names block `i`, which `table[i]` holds, or will
    hold once it is taken. `epoch` changes whenever the blocks are given up: whoever waited for something to write into
    them must compare it first.
    """

    id: str
    tokens: list[int]
    prompt_len: int
    lineage: Lineage
    max_tokens: int
    """Most completion tokens, those of an earlier attempt included."""
    sampling: Sampling
    seed: int
    priority: int = 1
    """0 is the highest."""
    arrival: int = 0
    waited: int = 0
    """Plans in which it could have run and stood by: while it waited, or while its prompt was passed over."""
    preemptions: int = 0
    phase: Phase = Phase.WAITING
    computed: int = 0
    table: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    slot: int = NO_SLOT
    """Its own among the sequences that hold blocks, the same for as long as it holds them."""
    drafts: tuple[int, ...] = ()
    epoch: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in a cache when the request was first admitted; None before."""
    adjustments: Adjustments | None = None
    """They have taken all generated tokens, and never a draft that was not accepted."""
    guide: Guide | None = None
    """It has taken all generated tokens; while a step runs, the step's thread calls it. None also for a form that is
    not compiled yet: no step before that."""
    logprobs: int | None = None
    """Of how many most likely tokens log-probabilities are wanted, besides the chosen one's; None: not even of that."""
    fetched_s: float = 0.0
    """How long blocks of it were being fetched; the loader measures it."""
    loading: tracing.Span = tracing.UNTRACED
    """What tells of its loading."""
    _state: tuple[int, bytes] = field(default=(0, b""), init=False, repr=False)
    """A hidden state, and how many tokens there were when its own was the last of them."""

    @property
    def hidden(self) -> bytes:
        """What the LM head read when the last token was chosen, as `Sampled.hidden`; empty where that is not known, as
        with a token of the prompt or of an earlier attempt."""
        length, state = self._state
        return state if length == len(self.tokens) else b""

    def extend(self, tokens: tuple[int, ...], hidden: bytes = b"") -> None:
        """These were generated, the last one from the state `hidden`."""
        self.tokens += tokens
        self._state = len(self.tokens), hidden
        if self.adjustments is not None:
            self.adjustments.take(tokens)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed. 1 means: generating."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def complete(self) -> bool:
        """Nothing may follow, by the form that its answer must have."""
        return self.guide is not None and self.guide.ended

    @property
    def generating(self) -> bool:
        return self.phase is Phase.READY and self.remaining == 1

    @property
    def effective_priority(self) -> int:
        """Its priority, raised by what it has waited. Time spent running does not count: that is not neglect."""
        return max(self.priority - self.waited // AGEING_PLANS, 0)

    @property
    def rank(self) -> tuple[int, int]:
        """Who has more right to blocks comes first; the last is preempted first."""
        return self.effective_priority, self.arrival

    @property
    def turn(self) -> tuple[int, bool, int]:
        """Who is admitted, and whose prompt is computed, comes first: of one priority those resumed before new ones."""
        resumed = bool(self.preemptions or self.generated)
        return self.effective_priority, not resumed, self.arrival

    def meta(self, index: int, block_size: int) -> BlockMeta:
        """What the shared cache is told of this sequence's full block `index`."""
        parent = self.lineage.parent(index, self.names)
        tokens = tuple(self.tokens[index * block_size : (index + 1) * block_size])
        return BlockMeta(self.names[index], parent, tokens, scope=self.lineage.scope(index))

    def name_blocks(self, count: int, block_size: int) -> None:
        """Make sure that the first `count` full blocks have names."""
        self.lineage.extend(self.names, count, self.tokens, block_size)


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
    logprobs: tuple[Logprob, ...] | None = None
    """Of these tokens, if the sequence wants them."""
