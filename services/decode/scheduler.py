"""Which sequences run in the next step, on which blocks. Pure: no I/O, no clock, no torch.

Time is counted in plans. Running sequences and their drafts come first, prefill chunks take what is left of the step's
token budget. When blocks run out, unused cached ones are evicted (by the allocator), then the youngest sequence of the
lowest priority is preempted: it gives up its blocks and is admitted again later.

Nobody starves. Who stands by rises in priority (`Sequence.effective_priority`): after 2 * AGEING_PLANS plans a low one
is as high as any, and from then on only older sequences and those that were preempted come before it, which are not
endless. The first in rank can always go on, because it may preempt all others, so there is always one that finishes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq

from services.decode.holdings import Holdings
from services.decode.sequence import Outcome, Sequence, Work
from shared.cache.blocks import BlockAllocator
from shared.engine.base import Sampled
from shared.engine.span import Span
from shared.errors import ContextLengthExceeded, TrineError
from shared.lifecycle import Phase, advance

MIXED_ON_CPU = 64
"""Of prompts, beside running answers. A chunk of 256 takes four times as long and is 20 % cheaper a token."""


class DecodeScheduler:
    """Owns the sequences of one worker, with their blocks and slots.

    A caller alternates `plan` and `complete` (or `abandon`); anything else may be called in between, also while the
    planned step is running: what the running step writes is given back only when it is over.

    A step has at most `step_tokens` tokens, or one for each generating sequence if those are more; and one block beyond
    that where less is left to the prefill. Where sequences generate, at most `mixed_tokens` are of prompts.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        context_length: int,
        max_running: int,
        step_tokens: int,
        mixed_tokens: int | None = None,
    ) -> None:
        self._allocator = allocator
        self._holdings = Holdings(allocator, context_length=context_length, slots=max_running)
        self._block_size = block_size
        self._context = context_length
        self._step_tokens = step_tokens
        self._mixed_tokens = step_tokens if mixed_tokens is None else mixed_tokens
        self._waiting: list[Sequence] = []
        self._admitted: list[Sequence] = []
        self._in_step: dict[Sequence, Work] = {}
        self._arrivals = 0
        self._hidden = False
        self.preemptions = 0

    # Arriving and leaving

    @property
    def running(self) -> int:
        return len(self._admitted)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether to take another request: nobody waits for blocks, and a step has a place."""
        return not self._waiting and bool(self._holdings.free_slots)

    def live(self) -> list[Sequence]:
        return [*self._admitted, *self._waiting]

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises ContextLengthExceeded for one that could never run here."""
        if len(sequence.tokens) >= self._context and not sequence.generated:
            raise ContextLengthExceeded(
                f"the prompt has {sequence.prompt_len} tokens; the model's context is {self._context}, "
                "which must leave room for one more",
                field="prompt",
            )
        most = self._holdings.most(sequence)
        if most > self._allocator.num_blocks:
            raise ContextLengthExceeded(
                f"prompt and max_tokens need {most} KV blocks; this worker has {self._allocator.num_blocks}",
                field="max_tokens",
            )
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._waiting.append(sequence)

    def end(self, sequence: Sequence) -> None:
        """Finished, failed, cancelled or handed back; may be called at any time, also twice."""
        if sequence.phase is Phase.ENDED:
            return
        sequence.phase = advance(sequence.phase, Phase.ENDED)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._admitted:
            self._admitted.remove(sequence)
        if sequence not in self._in_step:
            self._holdings.give_up(sequence)

    # Admission and loading

    def admit(self) -> list[Sequence]:
        """Let waiting sequences in, in turn, while there are slots and blocks; they are LOADING from then on.

        Whatever prefix this worker's own pool has is taken at once. The first that does not fit holds up those after
        it, or a long one would wait for ever.
        """
        admitted = []
        self._waiting.sort(key=lambda s: s.turn)
        while self._waiting and self._holdings.start(self._waiting[0], self._admitted):
            sequence = self._waiting.pop(0)
            self._admitted.append(sequence)
            sequence.phase = advance(sequence.phase, Phase.LOADING)
            admitted.append(sequence)
        return admitted

    def place(self, sequence: Sequence, index: int) -> int | None:
        """The block that is to be number `index` of a sequence that is LOADING; None if none is left for it."""
        covered = self._holdings.extend(sequence, (index + 1) * self._block_size, self._admitted)
        return sequence.table[index] if covered else None

    def filled(self, sequence: Sequence, index: int) -> None:
        """Block `index`, the first one not computed, was loaded with its right bytes."""
        if index * self._block_size != sequence.computed:
            raise TrineError(f"block {index} was loaded out of order")
        self._holdings.commit(sequence, range(index, index + 1))
        sequence.computed += self._block_size

    def loaded(self, sequence: Sequence) -> None:
        """Loading is over, with or without success; the rest is computed here."""
        sequence.phase = advance(sequence.phase, Phase.READY)

    # Steps

    def plan(self, *, hidden: bool = False) -> list[Work]:
        """The next step: every generating sequence with its drafts, then prefill chunks within the token budget.

        `hidden`: somebody reads the hidden states that tokens are chosen from.
        """
        self._hidden = hidden
        ready = [s for s in self._admitted if s.phase is Phase.READY]
        works = self._decode_works(sorted((s for s in ready if s.remaining == 1), key=lambda s: s.rank))
        left = self._step_tokens - sum(len(w.span.token_ids) for w in works)
        left = min(left, self._mixed_tokens) if works else left
        busy = {w.sequence for w in works}
        # Prefill always goes on, however many generate.
        prefilling = sorted((s for s in ready if s.remaining > 1), key=lambda s: s.turn)
        works += self._prefill_works(prefilling, max(left, self._block_size), busy)
        self._in_step = {w.sequence: w for w in works}
        for sequence in self.live():
            if sequence not in self._in_step and sequence.phase is not Phase.LOADING:
                sequence.waited += 1
        return works

    def _decode_works(self, generating: list[Sequence]) -> list[Work]:
        """Everybody's own token has its place before any draft has: a draft costs nobody a block or a turn."""
        running: dict[Sequence, None] = {}
        for sequence in generating:
            if sequence.phase is Phase.READY and self._cover(sequence, len(sequence.tokens), running):
                running[sequence] = None
        spare = max(self._step_tokens - len(running), 0)
        works = []
        for sequence in running:
            works.append(self._decode_work(sequence, spare))
            spare -= works[-1].drafts
        return works

    def _decode_work(self, sequence: Sequence, spare: int) -> Work:
        # Drafts after the last token that may be generated, or beyond the context, could never be used.
        useful = self._holdings.positions(sequence) - len(sequence.tokens)
        drafts = sequence.drafts[: max(min(spare, useful), 0)]
        if not self._holdings.extend(sequence, len(sequence.tokens) + len(drafts), self._admitted):
            drafts = drafts[: len(sequence.table) * self._block_size - len(sequence.tokens)]
        return self._work(sequence, (sequence.tokens[-1], *drafts), rows=1 + len(drafts), drafts=len(drafts))

    def _prefill_works(self, prefilling: list[Sequence], budget: int, busy: set[Sequence]) -> list[Work]:
        works = []
        claimed: set[bytes] = set()  # blocks that this step computes: who needs them too waits for it
        for sequence in prefilling:
            if sequence.phase is not Phase.READY:
                continue  # preempted by one before it
            self._holdings.take_over(sequence)
            first, count = sequence.computed // self._block_size, self._chunk(sequence, budget)
            if not count or not claimed.isdisjoint(sequence.names[first : first + 1]):
                continue
            end = sequence.computed + count
            if not self._cover(sequence, end, busy):
                continue
            tokens = tuple(sequence.tokens[sequence.computed : end])
            works.append(self._work(sequence, tokens, rows=int(end == len(sequence.tokens))))
            claimed.update(sequence.names[first : end // self._block_size])
            busy.add(sequence)
            budget -= count
        return works

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens to compute now: all that remain, or as many as end with a full block, perhaps none.

        So a chunk always begins with a block.
        """
        if sequence.remaining <= budget:
            return sequence.remaining
        return budget - budget % self._block_size

    def _work(self, sequence: Sequence, tokens: tuple[int, ...], rows: int, drafts: int = 0) -> Work:
        span = Span(
            tokens,
            sequence.computed,
            tuple(sequence.table),
            rows,
            seed=sequence.seed,
            sampling=sequence.sampling,
            slot=sequence.slot,
            adjustments=sequence.adjustments,
            guesses=drafts,
            logprobs=sequence.logprobs,
            hidden=self._hidden,
        )
        return Work(sequence, span, drafts)

    def _cover(self, sequence: Sequence, positions: int, busy: Collection[Sequence]) -> bool:
        """Make the table long enough, by preemption of those after it if need be. False: it must stand by."""
        while not self._holdings.extend(sequence, positions, self._admitted):
            victims = [s for s in self._admitted if s.rank > sequence.rank and s not in busy]
            if not victims:
                return False
            self._preempt(max(victims, key=lambda s: s.rank))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.preemptions += 1
        self._admitted.remove(sequence)
        self._holdings.give_up(sequence)
        sequence.phase = advance(sequence.phase, Phase.WAITING)
        self._waiting.append(sequence)

    def complete(self, works: Seq[Work], sampled: Seq[Sampled]) -> list[Outcome]:
        """Take in a step's result. A draft is accepted iff it equals the token the target itself took there."""
        outcomes = []
        for work, taken in zip(works, sampled, strict=True):
            self._in_step.pop(work.sequence)
            if work.sequence.phase is Phase.ENDED:
                self._holdings.give_up(work.sequence)
                continue
            outcomes.append(self._advance(work, taken))
        return outcomes

    def abandon(self, works: Seq[Work]) -> None:
        """The step failed: nothing of it counts, the sequences are where they were before it."""
        for work in works:
            self._in_step.pop(work.sequence)
            if work.sequence.phase is Phase.ENDED:
                self._holdings.give_up(work.sequence)

    def _advance(self, work: Work, taken: Sampled) -> Outcome:
        sequence, span = work.sequence, work.span
        drafts = span.token_ids[len(span.token_ids) - work.drafts :]
        accepted = min(accepted_count(drafts, taken.tokens), len(taken.tokens) - 1) if span.rows else 0
        new = tuple(taken.tokens[: accepted + 1])
        before = sequence.computed // self._block_size
        sequence.computed = span.start + len(span.token_ids) - work.drafts + accepted
        sequence.extend(new, taken.hidden[accepted] if taken.hidden else b"")
        sequence.drafts = ()
        filled = range(before, sequence.computed // self._block_size)
        self._holdings.commit(sequence, filled)
        logprobs = None if taken.logprobs is None else tuple(taken.logprobs[: accepted + 1])
        return Outcome(sequence, new, work.drafts, accepted, filled, logprobs)

    def check_integrity(self, elsewhere: Iterable[Seq[int]] = ()) -> None:
        """Raises TrineError if sequences, blocks and slots contradict each other.

        `elsewhere`: lists of blocks on which others than this scheduler hold a reference.
        """
        ended = [s for s in self._in_step if s.phase is Phase.ENDED]
        self._holdings.check([*self._admitted, *ended], self._in_step.values(), elsewhere)
        for sequence in self._waiting:
            if sequence.table or sequence.computed:
                raise TrineError(f"{sequence.id} waits and holds blocks")


def accepted_count(drafts: Seq[int], taken: Seq[int]) -> int:
    """How many drafts the target took itself, up to the first it did not."""
    count = 0
    for draft, token in zip(drafts, taken, strict=False):
        if draft != token:
            break
        count += 1
    return count
