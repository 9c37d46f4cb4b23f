"""Which raw keys each slot still has. Pure: no torch.

With a codec that seals whole blocks, a span that begins inside a block needs the raw keys of that block's earlier
positions. They are there if the slot's last spans wrote them and it goes back no further than promised.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.engine.span import Span
from shared.errors import InvalidField


class TailBook:
    """`held[slot]` are the positions [first, end) whose raw keys the slot has."""

    def __init__(self, ring: int, block_size: int) -> None:
        self._ring, self._block_size = ring, block_size
        self._held: dict[int, tuple[int, int]] = {}

    def check(self, spans: Sequence[Span]) -> None:
        """Raises InvalidField for a span whose earlier keys are gone: its KV would be silently wrong."""
        for i, span in enumerate(spans):
            lead = span.start % self._block_size
            first, end = self._held.get(span.slot, (0, 0))
            if lead and not first <= span.start - lead < span.start <= end:
                raise InvalidField(
                    f"span {i} starts at {span.start}, but slot {span.slot} holds {first} to {end}", field="slot"
                )

    def wrote(self, spans: Sequence[Span]) -> None:
        """The step is done: what the slots hold now."""
        for span in spans:
            end = span.start + len(span.token_ids)
            begin = span.start - span.start % self._block_size
            self._held[span.slot] = (max(begin, end - self._ring), end)
