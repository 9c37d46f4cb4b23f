"""Who holds which block of a KV pool: reference counts, the local prefix index, and what to evict next.

Pure bookkeeping over block ids 0 .. num_blocks-1; the bytes live in the engine's pool. A block is in exactly one state:

free      no references, no name
in use    one or more references; named once it is full and immutable
unused    no references, but named: a later `match` may find it, and `allocate` evicts it when nothing is free
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from shared.errors import TrineError


class OutOfBlocks(TrineError):
    """Fewer blocks are available than were asked for. Nothing was allocated; release or preempt, then retry."""

    code = "out_of_blocks"


class BlockMisuse(TrineError):
    """A caller broke the rules (double release, unknown block, renaming) or the bookkeeping contradicts itself."""


@dataclass(slots=True)
class BlockCounters:
    hits: int = 0  # blocks found by `match`
    evictions: int = 0  # unused cached blocks given to somebody else


class BlockAllocator:
    """Ref-counted blocks of `block_size` tokens with a prefix index by block name. Not thread-safe."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.counters = BlockCounters()
        self.changes = 0  # of the set of names
        self._refs = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._by_name: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()  # next to be evicted first

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now: free ones and unused cached ones."""
        return len(self._free) + len(self._unused)

    @property
    def in_use(self) -> int:
        return self.num_blocks - self.available

    @property
    def cached(self) -> int:
        """Named blocks, in use or not."""
        return len(self._by_name)

    def names(self) -> Collection[bytes]:
        """Of all named blocks."""
        return self._by_name.keys()

    def references(self, block: int) -> int:
        return self._refs[self._checked(block)]

    def name_of(self, block: int) -> bytes | None:
        return self._names[self._checked(block)]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy."""
        return -(-tokens // self.block_size)

    def allocate(self, n: int) -> list[int]:
        """`n` private blocks with one reference each, or OutOfBlocks and no change at all.

        Free blocks go first, then the least recently used unused ones lose their names.
        """
        if n < 0:
            raise ValueError("cannot allocate a negative number of blocks")
        if n > self.available:
            raise OutOfBlocks(f"{n} blocks wanted, {self.available} of {self.num_blocks} available")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(n)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def peek(self, names: Sequence[bytes]) -> int:
        """How many of `names`, from the first on, are cached here. Takes nothing and counts nothing."""
        for length, name in enumerate(names):
            if name not in self._by_name:
                return length
        return len(names)

    def match(self, names: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `names`, with one more reference on each."""
        blocks = [self._by_name[name] for name in names[: self.peek(names)]]
        for block in blocks:
            self._unused.pop(block, None)
            self._refs[block] += 1
        self.counters.hits += len(blocks)
        return blocks

    def take(self, name: bytes) -> int | None:
        """The block under this name, with one more reference on it; counted as no hit."""
        if (block := self._by_name.get(name)) is not None:
            self._unused.pop(block, None)
            self._refs[block] += 1
        return block

    def hold(self, blocks: Sequence[int]) -> None:
        """One more reference on each of these blocks, which somebody holds already."""
        if any(self._refs[self._checked(block)] == 0 for block in blocks):
            raise BlockMisuse("a block to be held is nobody's")
        for block in blocks:
            self._refs[block] += 1

    def commit(self, block: int, name: bytes) -> None:
        """The block is full and will not change any more: others may find it under `name`.

        If another block holds this name already, ours stays private; its content is the same.
        """
        if self._refs[self._checked(block)] == 0:
            raise BlockMisuse(f"block {block} is named but nobody holds it")
        if self._names[block] not in (None, name):
            raise BlockMisuse(f"block {block} already has another name")
        if self._by_name.setdefault(name, block) == block:
            self._names[block] = name
            self.changes += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each block; list a chain from its head to its tail.

        Named blocks without references stay cached, and of those released together the tail is evicted before
        the head, because a tail without its head can never be matched.
        """
        for block, count in Counter(blocks).items():
            if self._refs[self._checked(block)] < count:
                raise BlockMisuse(f"block {block} is released {count} times but held {self._refs[block]} times")
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._retire(block)

    def drop(self, name: bytes) -> None:
        """Forget a name, if it is known: the block will not be matched again, holders keep it."""
        block = self._by_name.pop(name, None)
        if block is None:
            return
        self._names[block] = None
        self.changes += 1
        if self._refs[block] == 0:
            del self._unused[block]
            self._free.append(block)

    def forget(self) -> int:
        """Drop all names; says how many there were."""
        names = list(self._by_name)
        for name in names:
            self.drop(name)
        return len(names)

    def _retire(self, block: int) -> None:
        if self._names[block] is None:
            self._free.append(block)
        else:
            self._unused[block] = None

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        name = self._names[block]
        assert name is not None  # only named blocks are unused
        del self._by_name[name]
        self._names[block] = None
        self.changes += 1
        self.counters.evictions += 1
        return block

    def _checked(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise BlockMisuse(f"no block {block} in a pool of {self.num_blocks}")
        return block

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise BlockMisuse naming every contradiction between counts, names and lists. O(num_blocks).

        With `tables`, all lists of blocks that anybody holds: also that each block is counted as often as it is held.
        """
        free, unused = set(self._free), set(self._unused)
        wrong = [f"block {b} is in the free list twice" for b, n in Counter(self._free).items() if n > 1]
        for block, (refs, name) in enumerate(zip(self._refs, self._names, strict=True)):
            state = (refs == 0 and name is None, refs == 0 and name is not None)
            if refs < 0:
                wrong.append(f"block {block} has {refs} references")
            if (block in free, block in unused) != state:
                wrong.append(
                    f"block {block}: refs {refs}, named {name is not None}, but listed as {self._state(block)}"
                )
            if name is not None and self._by_name.get(name) != block:
                wrong.append(f"block {block} has a name that leads to {self._by_name.get(name)}")
        wrong += [f"a name leads to block {b}, which lacks it" for n, b in self._by_name.items() if self._names[b] != n]
        if tables is not None:
            held = Counter(block for table in tables for block in table)
            counted = enumerate(self._refs)
            wrong += [f"block {b} has {refs} references, {held[b]} hold it" for b, refs in counted if refs != held[b]]
        if wrong:
            raise BlockMisuse("; ".join(wrong))

    def _state(self, block: int) -> str:
        return "free" if block in self._free else "unused" if block in self._unused else "in use"
