"""The index of the shared cache against a model of the stream it hears about."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.cache.index import PrefixIndex

NAMES = [bytes([i]) * 32 for i in range(6)]
PARTS = 2


class IndexMachine(RuleBasedStateMachine):
    """Model: a stream of the last message per subject, FIFO eviction, deletes; the feed and the poll are in step."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(PARTS)
        self.stream: dict[tuple[bytes, int], int] = {}
        self.last = 0
        self.forgotten: set[bytes] = set()

    def first(self) -> int:
        return min(self.stream.values(), default=self.last + 1)

    @rule(name=st.sampled_from(NAMES), part=st.integers(0, PARTS - 1))
    def publish(self, name, part):
        self.last += 1
        self.stream.pop((name, part), None)
        self.stream[name, part] = self.last
        self.index.observe(self.last, name, part)
        self.index.horizon(self.first())

    @rule(n=st.integers(1, 3))
    def evict(self, n):
        for key in list(self.stream)[:n]:
            del self.stream[key]
        self.index.horizon(self.first())

    @rule(name=st.sampled_from(NAMES))
    def delete_and_miss(self, name):
        """A hole that no horizon shows: found by asking."""
        for part in range(PARTS):
            self.stream.pop((name, part), None)
        self.index.forget(name)

    @rule()
    def feed_starts_over(self):
        for (name, part), seq in self.stream.items():
            self.index.observe(seq, name, part)
        self.index.horizon(self.first())

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=6, unique=True))
    def stream_is_created_anew(self, names):
        self.stream, self.last = {}, 0
        self.index.reset()
        for name in names:
            self.publish(name, 0)
            self.publish(name, 1)

    @invariant()
    def knows_what_is_there(self):
        for name in NAMES:
            assert self.index.present(name) == all((name, part) in self.stream for part in range(PARTS)), name
        present = [all((name, part) in self.stream for part in range(PARTS)) for name in NAMES]
        assert self.index.longest(NAMES) == [*present, False].index(False)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def told(count: int, parts: int = 1, max_names: int = 100) -> PrefixIndex:
    index = PrefixIndex(parts, max_names)
    for i in range(count):
        index.observe(i + 1, NAMES[i])
    return index


def test_a_block_is_present_when_all_its_parts_are():
    index = PrefixIndex(3)
    assert [index.observe(seq, NAMES[0], part) for seq, part in ((1, 2), (2, 0))] == [False, False]
    assert not index.present(NAMES[0])
    assert index.observe(3, NAMES[0], 1)
    index.horizon(2)
    assert not index.present(NAMES[0]), "one part was evicted"


def test_the_longest_prefix_ends_at_the_first_hole():
    index = told(4)
    assert index.longest(NAMES) == 4
    index.forget(NAMES[1])
    assert index.longest(NAMES) == 1
    assert index.longest(NAMES[2:]) == 2
    assert index.longest([]) == 0


def test_eviction_moves_the_horizon_and_frees_memory():
    index = told(5)
    index.horizon(4)
    assert [index.present(name) for name in NAMES[:5]] == [False, False, False, True, True]
    assert len(index) == 2


def test_the_horizon_never_goes_back():
    index = PrefixIndex(2)
    index.observe(1, NAMES[0], 0)
    index.observe(3, NAMES[0], 1)
    index.horizon(2)
    index.horizon(1)
    assert not index.present(NAMES[0])


def test_an_answer_older_than_the_feed_takes_nothing_away():
    index = told(2)
    index.horizon(1)
    index.observe(9, NAMES[0])
    index.horizon(3)
    assert index.present(NAMES[0])
    assert not index.present(NAMES[1])


def test_a_sequence_that_goes_back_means_another_stream():
    index = told(5)
    generation = index.generation
    index.observe(1, NAMES[5])
    assert index.generation == generation + 1
    assert [index.present(name) for name in NAMES] == [False] * 5 + [True]


def test_a_repeated_last_message_is_no_new_stream():
    index = told(5)
    assert index.observe(5, NAMES[4])
    assert index.longest(NAMES) == 5


def test_memory_is_bounded_and_the_oldest_go_first():
    index = told(6, max_names=3)
    assert len(index) == 3
    assert [index.present(name) for name in NAMES] == [False] * 3 + [True] * 3


def test_a_block_told_again_is_the_youngest():
    index = told(3, max_names=3)
    index.observe(4, NAMES[0])
    index.observe(5, NAMES[4])
    assert [index.present(name) for name in NAMES[:3]] == [True, False, True]


@pytest.mark.parametrize("part", [-1, 1, 2**40])
def test_parts_that_no_block_has_are_ignored(part):
    index = PrefixIndex(1)
    assert not index.observe(1, NAMES[0], part)
    assert len(index) == 0


def test_only_a_full_stream_fades_at_its_old_end():
    index = PrefixIndex()
    for seq in range(1, 101):
        index.observe(seq, seq.to_bytes(32, "big"))
    index.horizon(1)
    assert not index.fading(1)
    index.horizon(1, full=True)
    assert [index.fading(seq) for seq in (0, 1, 24, 26, 100)] == [False, True, True, False, False]


@pytest.mark.parametrize(("parts", "max_names"), [(0, 1), (1, 0)])
def test_sizes_must_be_positive(parts, max_names):
    with pytest.raises(ValueError, match="at least 1"):
        PrefixIndex(parts, max_names)
