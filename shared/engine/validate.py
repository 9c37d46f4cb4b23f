"""Whether spans can be run: what a wrong one would do to memory or to other sequences is refused first. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from shared.engine.base import ModelInfo
from shared.engine.span import Span
from shared.errors import ContextLengthExceeded, InvalidField


def check(spans: Sequence[Span], info: ModelInfo) -> None:
    """Raises ContextLengthExceeded, or InvalidField naming the field and the span."""
    writers: dict[int, int] = {}
    slots: set[int] = set()
    for i, span in enumerate(spans):
        length = len(span.token_ids)
        end = span.start + length
        if not length or not 0 <= span.rows <= length:
            raise InvalidField(f"span {i}: {span.rows} rows of {length} tokens", field="rows")
        if span.start < 0:
            raise InvalidField(f"span {i}: starts at {span.start}", field="start")
        if end > info.context_length:
            raise ContextLengthExceeded(f"span {i} ends at {end}; the context has {info.context_length} positions")
        if min(span.token_ids) < 0 or max(span.token_ids) >= info.vocab_size:
            raise InvalidField(f"span {i}: a token id is not below {info.vocab_size}", field="token_ids")
        if span.masks is not None and span.masks.shape != (span.rows, -(-info.vocab_size // 32)):
            raise InvalidField(f"span {i}: masks of shape {span.masks.shape}", field="masks")
        _check_table(i, span, end, info, writers)
        if info.slots:
            _check_slot(i, span, info, slots)


def _check_slot(i: int, span: Span, info: ModelInfo, taken: set[int]) -> None:
    if not 0 <= span.slot < info.slots or span.slot in taken:
        raise InvalidField(f"span {i}: slot {span.slot} is not below {info.slots}, or taken twice", field="slot")
    taken.add(span.slot)


def _check_table(i: int, span: Span, end: int, info: ModelInfo, writers: dict[int, int]) -> None:
    """`writers`: which span writes a block. Two spans may read a block; if two write it, both are wrong."""
    needed = -(-end // info.block_size)
    if len(span.table) < needed:
        raise InvalidField(f"span {i}: {len(span.table)} blocks for {end} positions", field="table")
    if min(span.table) < 0 or max(span.table) >= info.kv_blocks:
        raise InvalidField(f"span {i}: a block is not below {info.kv_blocks}", field="table")
    for block in span.table[span.start // info.block_size : needed]:
        if writers.setdefault(block, i) != i:
            raise InvalidField(f"spans {writers[block]} and {i} both write block {block}", field="table")
