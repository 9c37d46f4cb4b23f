"""What a decode worker's sequences hold: KV blocks and slots. Pure: no I/O, no clock, no torch.

Blocks are taken when they are written, not before: a block that waits for tokens to come is wasted, and the cached one
that it replaces is lost. Admission makes sure that there are enough, and promises them: whoever comes later in rank
leaves them alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from services.decode.sequence import NO_SLOT, Sequence, Work
from shared.cache.blocks import BlockAllocator
from shared.errors import TrineError


class Holdings:
    """Gives sequences blocks of `allocator` and slots 0 .. slots-1, and takes them back."""

    def __init__(self, allocator: BlockAllocator, *, context_length: int, slots: int) -> None:
        self._allocator = allocator
        self._context = context_length
        self._slots = range(slots)
        self._free_slots = list(reversed(self._slots))

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    # What a sequence needs

    def positions(self, sequence: Sequence) -> int:
        """Most positions whose KV will ever be needed: all but that of the last token."""
        return min(sequence.prompt_len + sequence.max_tokens, self._context) - 1

    def most(self, sequence: Sequence) -> int:
        """Most blocks that it will ever need."""
        return self._allocator.blocks_for(self.positions(sequence))

    def _need(self, sequence: Sequence) -> int:
        """Blocks for the tokens it has and for the next one."""
        return self._allocator.blocks_for(min(len(sequence.tokens) + 1, self.positions(sequence)))

    def _growth(self, sequence: Sequence) -> int:
        """Blocks that it may come to need beyond that."""
        return max(self.most(sequence) - max(self._need(sequence), len(sequence.table)), 0)

    def _promised(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that these were admitted for and have not taken yet."""
        return sum(max(self._need(s) - len(s.table), 0) for s in sequences)

    # Giving and taking

    def start(self, sequence: Sequence, admitted: Seq[Sequence]) -> bool:
        """A slot, and the prefix that the pool has. False, and nothing done, if its blocks would not suffice.

        The last token is always left to compute, for its logits.
        """
        if not self._free_slots:
            return False
        reusable = (len(sequence.tokens) - 1) // self._allocator.block_size
        sequence.name_blocks(reusable, self._allocator.block_size)
        found = self._allocator.match(sequence.names[:reusable])
        wanted = self._need(sequence) - len(found) + self._headroom(sequence, admitted)
        if self._allocator.available - self._promised(admitted) < wanted:
            self._allocator.release(found)
            return False
        sequence.table = found
        sequence.computed = len(found) * self._allocator.block_size
        sequence.slot = self._free_slots.pop()
        return True

    def _headroom(self, sequence: Sequence, admitted: Seq[Sequence]) -> int:
        """Blocks to be left over, so that admission does not cause preemption soon.

        One for each that runs; more by powers of two for one that was preempted, so that it does not go in and out.
        Never more than all of them could grow by: then nobody will be preempted, and one that is alone always fits.
        """
        margin = len(admitted) + (2**sequence.preemptions if sequence.preemptions else 0)
        return min(margin, sum(self._growth(s) for s in (*admitted, sequence)))

    def extend(self, sequence: Sequence, positions: int, admitted: Iterable[Sequence]) -> bool:
        """Make the table long enough, if that takes no block promised to one of `admitted` before it in rank."""
        missing = self._allocator.blocks_for(positions) - len(sequence.table)
        if missing > 0:
            before = (s for s in admitted if s.rank < sequence.rank)
            if self._allocator.available - self._promised(before) < missing:
                return False
            sequence.table += self._allocator.allocate(missing)
        return True

    def take_over(self, sequence: Sequence) -> None:
        """Use blocks that others have computed since its admission. It must be at the start of a block."""
        first = sequence.computed // self._allocator.block_size
        shared = self._allocator.match(sequence.names[first:])
        self._allocator.release(sequence.table[first : first + len(shared)])  # taken for a step that failed
        sequence.table[first : first + len(shared)] = shared
        sequence.computed += len(shared) * self._allocator.block_size

    def commit(self, sequence: Sequence, blocks: range) -> None:
        """Blocks number `blocks` of its table are full: others may use them from now on."""
        sequence.name_blocks(blocks.stop, self._allocator.block_size)
        for index in blocks:
            self._allocator.commit(sequence.table[index], sequence.names[index])

    def give_up(self, sequence: Sequence) -> None:
        """Take back all that it holds; whoever waits for something to write into its blocks sees that by its epoch."""
        self._allocator.release(sequence.table)
        if sequence.slot != NO_SLOT:
            self._free_slots.append(sequence.slot)
        sequence.slot = NO_SLOT
        sequence.table = []
        sequence.names = []
        sequence.computed = 0
        sequence.drafts = ()
        sequence.epoch += 1

    # Contradictions

    def check(self, holders: Seq[Sequence], works: Iterable[Work], elsewhere: Iterable[Seq[int]]) -> None:
        """Raises TrineError naming a contradiction. `elsewhere`: blocks that others hold a reference on."""
        self._allocator.check_integrity([*(s.table for s in holders), *elsewhere])
        if sorted([*self._free_slots, *(s.slot for s in holders)]) != list(self._slots):
            raise TrineError(f"slots {self._free_slots} are free, {[s.slot for s in holders]} are held")
        for sequence in holders:
            self._check_table(sequence)
        for work in works:
            self._check_written(work)

    def _check_table(self, sequence: Sequence) -> None:
        size = self._allocator.block_size
        if not sequence.computed <= min(len(sequence.table) * size, len(sequence.tokens) - 1):
            raise TrineError(f"{sequence.id}: {sequence.computed} computed of {len(sequence.tokens)} tokens")
        for index, block in enumerate(sequence.table):
            name = self._allocator.name_of(block)
            if name is not None and ((index + 1) * size > sequence.computed or name != sequence.names[index]):
                raise TrineError(f"{sequence.id}: block {block} is named, but unfull or not its block {index}")

    def _check_written(self, work: Work) -> None:
        """What a step writes is private."""
        size, span = self._allocator.block_size, work.span
        end = span.start + len(span.token_ids)
        for block in span.table[span.start // size : -(-end // size)]:
            if self._allocator.references(block) != 1 or self._allocator.name_of(block) is not None:
                raise TrineError(f"{work.sequence.id}: block {block} is written, but others may read it")
        if span.slot != work.sequence.slot or span.table != tuple(work.sequence.table[: len(span.table)]):
            raise TrineError(f"{work.sequence.id}: its blocks or its slot changed while its step runs")
