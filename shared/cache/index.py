"""What the shared cache holds, as told by a headers-only feed of its stream. Pure: no I/O, no clock.

A part is present iff the feed told its sequence and the stream's first sequence has not passed it; a block is present
iff all its parts are. The feed is in order: a sequence that goes back means that the feed started over (the stream
was created anew, or the connection was lost), so everything known before is dropped and learnt again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_NAMES = 1 << 20


class PrefixIndex:
    """Names to sequences of blocks of `parts` parts each; at most `max_names`, the least recently told go first."""

    def __init__(self, parts: int = 1, max_names: int = MAX_NAMES) -> None:
        if parts < 1 or max_names < 1:
            raise ValueError("parts and max_names must be at least 1")
        self.parts = parts
        self.generation = 0  # grows with every reset
        self.first_seq = 0
        self.last_seq = 0  # highest sequence told by the feed
        self.full = False
        self.evicted = 0  # blocks that left the stream with its oldest messages
        self._max_names = max_names
        self._known: OrderedDict[bytes, list[int]] = OrderedDict()  # sequence per part, 0: not seen

    def __len__(self) -> int:
        return len(self._known)

    def observe(self, seq: int, name: bytes, part: int = 0) -> bool:
        """The feed told of a part. True if its block is present now. Parts out of range are ignored."""
        if seq < self.last_seq or (seq == self.last_seq and self._sequence(name, part) != seq):
            self.reset()
        self.last_seq = seq
        if not 0 <= part < self.parts:
            return False
        self._known.setdefault(name, [0] * self.parts)[part] = seq
        self._known.move_to_end(name)
        if len(self._known) > self._max_names:
            self._known.popitem(last=False)
        return self.present(name)

    def horizon(self, first_seq: int, full: bool = False) -> None:
        """Sequences below `first_seq` have left the stream; if it is `full`, the next ones are about to."""
        self.first_seq = max(self.first_seq, first_seq)
        self.full = full
        while self._known:
            name = next(iter(self._known))
            if max(self._known[name]) >= self.first_seq:
                return
            del self._known[name]
            self.evicted += 1

    def forget(self, name: bytes) -> None:
        """The block was looked for and not found, or found damaged; the next time the feed tells it, it is back."""
        self._known.pop(name, None)

    def reset(self) -> None:
        """The stream is another one now: nothing is known of it."""
        self._known.clear()
        self.first_seq = self.last_seq = 0
        self.full = False
        self.generation += 1

    def present(self, name: bytes) -> bool:
        seqs = self._known.get(name)
        return seqs is not None and min(seqs) > 0 and min(seqs) >= self.first_seq

    def longest(self, names: Sequence[bytes]) -> int:
        """How many of `names`, from the first on, are present; stops at the first hole."""
        for length, name in enumerate(names):
            if not self.present(name):
                return length
        return len(names)

    def sequence(self, name: bytes) -> int:
        """Highest sequence known of the block's parts, 0 if none is."""
        return max(self._known.get(name, (0,)))

    def fading(self, seq: int) -> bool:
        """The message with this sequence is among the oldest quarter of a stream that is evicting."""
        return self.full and self.first_seq <= seq < self.first_seq + (self.last_seq - self.first_seq) // 4

    def _sequence(self, name: bytes, part: int) -> int:
        seqs = self._known.get(name)
        return seqs[part] if seqs is not None and 0 <= part < self.parts else 0
