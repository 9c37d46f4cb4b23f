"""The block allocator against a model that is too simple to be wrong, and its rules one by one."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.cache.blocks import BlockAllocator, BlockMisuse, OutOfBlocks

BLOCKS = 6
NAMES = [bytes([i]) * 32 for i in range(8)]


class AllocatorMachine(RuleBasedStateMachine):
    """Model: who holds what (`held`, a list of references), which block has which name, and the order of eviction."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(BLOCKS, 16)
        self.held: list[int] = []
        self.names: dict[int, bytes] = {}
        self.unused: list[int] = []  # next to be evicted first

    def free(self) -> set[int]:
        return set(range(BLOCKS)) - set(self.held) - set(self.unused)

    @rule(n=st.integers(0, BLOCKS + 1))
    def allocate(self, n):
        free = self.free()
        if n > len(free) + len(self.unused):
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(n)
            return
        evicted = self.unused[: max(0, n - len(free))]
        blocks = self.allocator.allocate(n)
        assert len(set(blocks)) == n
        assert set(blocks) <= free | set(evicted)
        assert set(evicted) <= set(blocks)
        for block in evicted:
            self.unused.remove(block)
            del self.names[block]
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def commit(self, data, name):
        block = data.draw(st.sampled_from(sorted(set(self.held))))
        if self.names.get(block, name) != name:
            with pytest.raises(BlockMisuse):
                self.allocator.commit(block, name)
            return
        self.allocator.commit(block, name)
        if name not in self.names.values():
            self.names[block] = name

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=5, unique=True))
    def match(self, names):
        by_name = {name: block for block, name in self.names.items()}
        expected = []
        for name in names:
            if name not in by_name:
                break
            expected.append(by_name[name])
        assert self.allocator.peek(names) == len(expected)
        assert self.allocator.match(names) == expected
        self.held += expected
        self.unused = [b for b in self.unused if b not in expected]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        blocks = data.draw(st.lists(st.sampled_from(self.held), min_size=1, max_size=BLOCKS))
        held = Counter(self.held)
        if any(count > held[block] for block, count in Counter(blocks).items()):
            with pytest.raises(BlockMisuse):
                self.allocator.release(blocks)
            return
        self.allocator.release(blocks)
        for block in reversed(blocks):
            self.held.remove(block)
            if block not in self.held and block in self.names:
                self.unused.append(block)

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name):
        self.allocator.drop(name)
        for block in [b for b, n in self.names.items() if n == name]:
            del self.names[block]
            if block in self.unused:
                self.unused.remove(block)

    @invariant()
    def agrees_with_the_model(self):
        self.allocator.check_integrity()
        assert self.allocator.in_use == len(set(self.held))
        assert self.allocator.available == BLOCKS - len(set(self.held))
        assert self.allocator.cached == len(self.names)
        held = Counter(self.held)
        for block in range(BLOCKS):
            assert self.allocator.references(block) == held[block]
            assert self.allocator.name_of(block) == self.names.get(block)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_sequences_by_the_thousand_leave_nothing_behind():
    """Chains that share prefixes, admitted and finished at random: no block is lost or shared wrongly."""
    rng = random.Random(7)
    allocator = BlockAllocator(40, 16)
    running: list[list[int]] = []
    for _ in range(4000):
        action = rng.random()
        if action < 0.45:
            family, length = rng.randrange(5), rng.randint(1, 12)
            names = [bytes([family, i]) * 16 for i in range(length)]
            table = allocator.match(names)
            try:
                fresh = allocator.allocate(length + 1 - len(table))
            except OutOfBlocks:
                allocator.release(table)
            else:
                for block, name in zip(fresh, names[len(table) :], strict=False):
                    allocator.commit(block, name)
                running.append(table + fresh)
        elif running:
            allocator.release(running.pop(rng.randrange(len(running))))
        allocator.check_integrity()
        assert allocator.in_use == len({block for table in running for block in table})
    for table in running:
        allocator.release(table)
    assert allocator.in_use == 0
    assert allocator.counters.hits > 0
    assert allocator.counters.evictions > 0


def chain(allocator: BlockAllocator, tag: int, length: int) -> tuple[list[int], list[bytes]]:
    names = [bytes([tag, i]) * 16 for i in range(length)]
    blocks = allocator.allocate(length)
    for block, name in zip(blocks, names, strict=True):
        allocator.commit(block, name)
    return blocks, names


def test_allocation_is_all_or_nothing():
    allocator = BlockAllocator(4, 16)
    blocks, names = chain(allocator, 1, 2)
    allocator.release(blocks)
    allocator.allocate(1)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(4)
    assert allocator.available == 3
    assert allocator.peek(names) == 2, "a failed allocation must not evict"


def test_tails_are_evicted_before_heads():
    allocator = BlockAllocator(4, 16)
    blocks, names = chain(allocator, 1, 4)
    allocator.release(blocks)
    for left in (3, 2, 1):
        allocator.allocate(1)
        assert allocator.peek(names) == left


def test_the_least_recently_used_chain_goes_first():
    allocator = BlockAllocator(4, 16)
    (old, old_names), (new, new_names) = chain(allocator, 1, 2), chain(allocator, 2, 2)
    allocator.release(old)
    allocator.release(new)
    allocator.release(allocator.match(old_names))  # used again: now `new` is the oldest
    allocator.allocate(2)
    assert (allocator.peek(old_names), allocator.peek(new_names)) == (2, 0)


def test_free_blocks_are_taken_before_cached_ones():
    allocator = BlockAllocator(4, 16)
    blocks, names = chain(allocator, 1, 2)
    allocator.release(blocks)
    allocator.allocate(2)
    assert allocator.peek(names) == 2
    assert allocator.counters.evictions == 0


def test_a_hole_ends_the_match():
    allocator = BlockAllocator(4, 16)
    _, names = chain(allocator, 1, 3)
    allocator.drop(names[1])
    assert allocator.peek(names) == 1
    assert len(allocator.match(names)) == 1


def test_the_second_block_of_a_name_stays_private():
    allocator = BlockAllocator(4, 16)
    first, names = chain(allocator, 1, 1)
    second = allocator.allocate(1)
    allocator.commit(second[0], names[0])
    assert allocator.name_of(second[0]) is None
    assert allocator.match(names) == first
    allocator.release(second)
    assert allocator.available == 3
    assert allocator.cached == 1


def test_a_dropped_block_stays_with_its_holders():
    allocator = BlockAllocator(2, 16)
    blocks, names = chain(allocator, 1, 1)
    allocator.drop(names[0])
    assert allocator.references(blocks[0]) == 1
    assert allocator.peek(names) == 0
    allocator.release(blocks)
    allocator.check_integrity()
    assert allocator.available == 2
    assert allocator.cached == 0


def test_a_dropped_unused_block_is_free_at_once():
    allocator = BlockAllocator(2, 16)
    blocks, names = chain(allocator, 1, 2)
    allocator.release(blocks)
    allocator.drop(names[0])
    allocator.check_integrity()
    assert sorted(allocator.allocate(2)) == sorted(blocks)
    assert allocator.counters.evictions == 1


def test_misuse_is_refused_and_changes_nothing():
    allocator = BlockAllocator(3, 16)
    blocks = allocator.allocate(2)
    for wrong in ([blocks[0], blocks[0]], [2], [-1], [3]):
        with pytest.raises(BlockMisuse):
            allocator.release(wrong)
    with pytest.raises(BlockMisuse):
        allocator.commit(2, NAMES[0])
    with pytest.raises(ValueError, match="negative"):
        allocator.allocate(-1)
    allocator.check_integrity()
    assert allocator.in_use == 2


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda a: a._free.append(a._free[0]),
        lambda a: a._refs.__setitem__(0, 1),
        lambda a: a._names.__setitem__(0, b"x"),
        lambda a: a._by_name.__setitem__(b"x", 1),
        lambda a: a._unused.__setitem__(1, None),
        lambda a: a._free.pop(),
    ],
    ids=["free twice", "held but free", "named but free", "name without block", "unused but free", "lost"],
)
def test_check_integrity_finds_contradictions(corrupt):
    allocator = BlockAllocator(3, 16)
    allocator.check_integrity()
    corrupt(allocator)
    with pytest.raises(BlockMisuse):
        allocator.check_integrity()


def test_blocks_for_rounds_up():
    allocator = BlockAllocator(3, 16)
    assert [allocator.blocks_for(n) for n in (0, 1, 15, 16, 17, 32)] == [0, 1, 1, 1, 2, 2]
