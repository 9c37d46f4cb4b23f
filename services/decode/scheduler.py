"""Which sequences run in the next step, on which blocks. Pure: no I/O, no clock, no torch.

The order is by priority, then age. Running sequences and their drafts come first, prefill chunks take what is left
of the step's token budget. When blocks run out, unused cached ones are evicted (by the allocator), then the youngest
sequence of the lowest priority is preempted: it gives up its blocks and is admitted again later.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from services.decode.sequence import Outcome, Sequence, Work
from shared.cache.blocks import BlockAllocator, OutOfBlocks
from shared.engine.span import Span
from shared.errors import ContextLengthExceeded, TrineError
from shared.lifecycle import Phase, advance


class DecodeScheduler:
    """Owns the sequences of one worker and their blocks.

    A caller alternates `plan` and `complete`; anything else may be called in between, also while the planned step
    is running: blocks that the running step writes are given back only by `complete`.
    """

    def __init__(
        self, allocator: BlockAllocator, *, block_size: int, context_length: int, max_running: int, step_tokens: int
    ) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._context = context_length
        self._max_running = max_running
        self._step_tokens = step_tokens
        self._waiting: list[Sequence] = []
        self._admitted: list[Sequence] = []
        self._in_step: set[Sequence] = set()
        self._arrivals = 0
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
        return not self._waiting and len(self._admitted) < self._max_running

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
        longest = min(sequence.prompt_len + sequence.max_tokens, self._context)
        if self._blocks(longest) > self._allocator.num_blocks:
            raise ContextLengthExceeded(
                f"prompt and max_tokens need {self._blocks(longest)} KV blocks; this worker has "
                f"{self._allocator.num_blocks}",
                field="max_tokens",
            )
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._enqueue(sequence)

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
            self._give_up_blocks(sequence)

    # Admission and loading

    def admit(self) -> list[Sequence]:
        """Give blocks to waiting sequences, in order, while there are enough; they are LOADING from then on.

        Whatever prefix this worker's own pool has is taken at once. The last token is always left to compute, for
        its logits. One block per running sequence is kept free, so that admission does not cause preemption at once.
        """
        admitted = []
        while self._waiting and len(self._admitted) < self._max_running:
            sequence = self._waiting[0]
            if not self._take_blocks(sequence, headroom=len(self._admitted)):
                break
            self._waiting.pop(0)
            self._admitted.append(sequence)
            sequence.phase = advance(sequence.phase, Phase.LOADING)
            admitted.append(sequence)
        return admitted

    def _take_blocks(self, sequence: Sequence, headroom: int) -> bool:
        reusable = (len(sequence.tokens) - 1) // self._block_size
        sequence.name_blocks(reusable, self._block_size)
        found = self._allocator.match(sequence.names[:reusable])
        needed = self._blocks(len(sequence.tokens) + 1) - len(found)
        alone = not self._admitted
        if self._allocator.available < needed + (0 if alone else headroom):
            self._allocator.release(found)
            return False
        sequence.table = [*found, *self._allocator.allocate(needed)]
        sequence.computed = len(found) * self._block_size
        return True

    def filled(self, sequence: Sequence, index: int) -> None:
        """Block `index`, the first one not computed, was loaded with its right bytes."""
        if index * self._block_size != sequence.computed:
            raise TrineError(f"block {index} was loaded out of order")
        self._allocator.commit(sequence.table[index], sequence.names[index])
        sequence.computed += self._block_size

    def loaded(self, sequence: Sequence) -> None:
        """Loading is over, with or without success; the rest is computed here."""
        sequence.phase = advance(sequence.phase, Phase.READY)

    # Steps

    def plan(self) -> list[Work]:
        """The next step: every generating sequence with its drafts, then prefill chunks within the token budget."""
        order = sorted((s for s in self._admitted if s.phase is Phase.READY), key=_rank)
        works: list[Work] = []
        budget = self._step_tokens
        for sequence in [s for s in order if s.remaining == 1]:
            if sequence.phase is Phase.READY and (work := self._decode_work(sequence, budget, works)):
                works.append(work)
                budget -= len(work.span.token_ids)
        budget = max(budget, self._block_size)  # prefill always goes on, however many decode
        for sequence in [s for s in order if s.remaining > 1 and s.phase is Phase.READY]:
            if budget <= 0:
                break
            work = self._prefill_work(sequence, budget)
            works.append(work)
            budget -= len(work.span.token_ids)
        self._in_step = {w.sequence for w in works}
        return works

    def _decode_work(self, sequence: Sequence, budget: int, planned: list[Work]) -> Work | None:
        # Drafts after the last token that may be generated, or beyond the context, could never be used.
        room = min(
            sequence.max_tokens - sequence.generated - 1, self._context - len(sequence.tokens) - 1, max(budget - 1, 0)
        )
        drafts = sequence.drafts[: max(room, 0)]
        busy = {w.sequence for w in planned}
        if not self._cover(sequence, len(sequence.tokens) + len(drafts), busy):
            return None
        tokens = (sequence.tokens[-1], *drafts)
        return Work(sequence, self._span(sequence, tokens, rows=len(tokens)), drafts=len(drafts))

    def _prefill_work(self, sequence: Sequence, budget: int) -> Work:
        count = min(sequence.remaining, budget)
        tokens = tuple(sequence.tokens[sequence.computed : sequence.computed + count])
        return Work(sequence, self._span(sequence, tokens, rows=int(count == sequence.remaining)))

    def _span(self, sequence: Sequence, tokens: tuple[int, ...], rows: int) -> Span:
        return Span(tokens, sequence.computed, tuple(sequence.table), rows, sequence.seed, sequence.sampling)

    def _cover(self, sequence: Sequence, length: int, busy: set[Sequence]) -> bool:
        """Make the table long enough, preempting others if need be. False if `sequence` had to give way itself."""
        while (missing := self._blocks(length) - len(sequence.table)) > 0:
            try:
                sequence.table += self._allocator.allocate(missing)
            except OutOfBlocks:
                victims = [s for s in self._admitted if s.phase is Phase.READY and s not in busy]
                victim = max(victims, key=_rank)
                self._preempt(victim)
                if victim is sequence:
                    return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._admitted.remove(sequence)
        self._give_up_blocks(sequence)
        sequence.phase = advance(sequence.phase, Phase.WAITING)
        self._enqueue(sequence)

    def complete(self, works: Seq[Work], sampled: Seq[Seq[int]]) -> list[Outcome]:
        """Take in a step's result. A draft is accepted iff it equals the token the target itself took there."""
        self._in_step = set()
        outcomes = []
        for work, taken in zip(works, sampled, strict=True):
            if work.sequence.phase is Phase.ENDED:
                self._give_up_blocks(work.sequence)
                continue
            outcomes.append(self._advance(work, taken))
        return outcomes

    def abandon(self, works: Seq[Work]) -> None:
        """The step failed: nothing of it counts, the sequences are where they were before it."""
        self._in_step = set()
        for work in works:
            if work.sequence.phase is Phase.ENDED:
                self._give_up_blocks(work.sequence)

    def _advance(self, work: Work, taken: Seq[int]) -> Outcome:
        sequence, span = work.sequence, work.span
        drafts = span.token_ids[len(span.token_ids) - work.drafts :]
        accepted = accepted_count(drafts, taken)
        new = tuple(taken[: accepted + 1])
        before = sequence.computed // self._block_size
        sequence.computed = span.start + len(span.token_ids) - work.drafts + accepted
        sequence.tokens += new
        sequence.drafts = ()
        full = sequence.computed // self._block_size
        sequence.name_blocks(full, self._block_size)
        for index in range(before, full):
            self._allocator.commit(sequence.table[index], sequence.names[index])
        return Outcome(sequence, new, work.drafts, accepted, range(before, full))

    # Helpers

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _enqueue(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self._waiting.sort(key=_rank)

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self._allocator.release(sequence.table)
        sequence.table = []
        sequence.names = []
        sequence.computed = 0
        sequence.drafts = ()
        sequence.epoch += 1

    def check_integrity(self) -> None:
        """Raises TrineError if sequences and blocks contradict each other."""
        self._allocator.check_integrity()
        held: set[int] = set()
        for sequence in self._admitted:
            if self._blocks(sequence.computed) > len(sequence.table):
                raise TrineError(f"{sequence.id}: more computed than its blocks hold")
            held.update(sequence.table)
        for sequence in self._in_step:
            held.update(sequence.table)
        if len(held) > self._allocator.in_use:
            raise TrineError(f"sequences hold {len(held)} blocks, the allocator knows of {self._allocator.in_use}")
        if any(s.table for s in self._waiting):
            raise TrineError("a waiting sequence holds blocks")


def accepted_count(drafts: Seq[int], taken: Seq[int]) -> int:
    """How many drafts the target took itself, up to the first it did not."""
    count = 0
    for draft, token in zip(drafts, taken, strict=False):
        if draft != token:
            break
        count += 1
    return count


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival
