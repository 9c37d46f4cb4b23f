"""A step's spans as one flat row of tokens, built once and used by every layer.

Tokens are ordered by group. A group is attended in one call: either several short spans of similar context length,
padded to a rectangle, or one long span, cut into tiles so that no tile looks at keys far behind its last query.

Where keys are sealed block by block, a group has its keys twice: sealed ones from the pool, of all blocks before its
last query's, and raw ones, of the blocks its queries are in. Masks let each query see exactly one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shared.engine.span import Span

SHORT = 16
"""Up to so many query tokens count as short (decode steps, verification of drafts)."""
TILE = 128
"""Query tokens of a long span attended at a time; measured on 512 to 2,048-token chunks."""
_SLACK = 256
"""Padding, in tokens of context, that costs about as much as one more attention call per layer."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `first:last` of each sequence of the group against gathered keys `low:high`, and raw ones `raw`."""

    first: int
    last: int
    low: int
    high: int
    mask: Tensor | None
    """Additive, [sequences, 1, share * queries, keys]; None when every key counts for every query."""
    raw: slice | None = None
    """None where keys are not sealed."""


@dataclass(frozen=True, slots=True)
class Gather:
    """What a group reads under one attention window: `blocks` [sequences * n] in order, and how to use them.

    Of codecs that seal: `raw_rows` [sequences * m] into the step's raw keys, and `raw_blocks` whose values go with
    them, a whole number of blocks per sequence.
    """

    blocks: Tensor
    tiles: tuple[Tile, ...]
    raw_rows: Tensor | None = None
    raw_blocks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Raw:
    """Where unsealed keys come from and go to. A step's raw keys are `lead` rows of the tail, then its new tokens."""

    lead: Tensor
    """[spans * block_size] rows of the tail: the block that each span begins in, whole."""
    seal_blocks: Tensor
    """[n] blocks that the step fills."""
    seal_rows: Tensor
    """[n * block_size] of the raw keys."""
    keep_rows: Tensor
    """Which of the raw keys may be needed by a later step, and"""
    keep_at: Tensor
    """where in the tail they go."""


@dataclass
class Group:
    """Spans attended together. `width` queries per sequence; the shorter ones are padded with their last token."""

    tokens: slice
    width: int
    starts: np.ndarray
    ends: np.ndarray
    tables: list[tuple[int, ...]]
    pick: Tensor | None
    """[sequences * width] indices into the group's tokens; None when no span is padded."""
    unpick: Tensor | None
    """[tokens] indices into the padded rectangle."""
    device: torch.device
    raw_lead: np.ndarray | None = None
    """[sequences] where the raw keys of the block that each begins in are; None where keys are not sealed."""
    raw_new: np.ndarray | None = None
    """[sequences] where those of its new tokens are."""
    _gathers: dict[tuple[int | None, int, torch.dtype], Gather] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        return len(self.tables)

    def gather(self, window: int | None, share: int, block_size: int, dtype: torch.dtype) -> Gather:
        """`share` query heads use one KV head. `window`: a query sees that many positions, its own included."""
        key = (window, share, dtype)
        if key not in self._gathers:
            self._gathers[key] = self._build(window, share, block_size, dtype)
        return self._gathers[key]

    def _build(self, window: int | None, share: int, block_size: int, dtype: torch.dtype) -> Gather:
        oldest = np.maximum(self.starts - window + 1, 0) if window else np.zeros_like(self.starts)
        first = oldest // block_size
        last = -(-self.ends // block_size) if self.raw_lead is None else (self.ends - 1) // block_size
        count = int((last - first).max())
        blocks = _padded(self.tables, first, last, count)
        cuts = range(0, self.width, TILE) if self.sequences == 1 else (0,)
        step = TILE if self.sequences == 1 else self.width
        masks = _Masks(first * block_size, count * block_size, window, share, dtype, self.device)
        spans = [(cut, min(cut + step, self.width)) for cut in cuts]
        gathered = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        if self.raw_lead is None:
            return Gather(gathered, tuple(masks.tile(a, b, self._queries(a, b)) for a, b in spans))
        rows, raw_blocks, raw_first = self._raw(block_size)
        tiles = tuple(masks.sealed_tile(a, b, self._queries(a, b), raw_first, block_size) for a, b in spans)
        return Gather(gathered, tiles, torch.from_numpy(rows).to(self.device), raw_blocks)

    def _queries(self, first: int, last: int) -> np.ndarray:
        """Positions [sequences, last - first]; padding repeats the last."""
        positions: np.ndarray = np.minimum(self.starts[:, None] + np.arange(first, last), self.ends[:, None] - 1)
        return positions

    def _raw(self, block_size: int) -> tuple[np.ndarray, Tensor, np.ndarray]:
        """Raw rows and blocks of the region that the queries are in, and the position where each region begins."""
        assert self.raw_lead is not None and self.raw_new is not None
        low, high = self.starts // block_size, (self.ends - 1) // block_size
        count = int((high - low).max()) + 1
        begin = low * block_size
        positions = np.minimum(begin[:, None] + np.arange(count * block_size), self.ends[:, None] - 1)
        old = self.raw_lead[:, None] + positions - begin[:, None]
        new = self.raw_new[:, None] + positions - self.starts[:, None]
        rows = np.where(positions < self.starts[:, None], old, new).reshape(-1)
        return rows, torch.tensor(_padded(self.tables, low, high + 1, count), device=self.device), begin


@dataclass(frozen=True, slots=True)
class _Masks:
    """Makes tiles. `base` [sequences] is the position of the first gathered key; `width` keys are gathered."""

    base: np.ndarray
    width: int
    window: int | None
    share: int
    dtype: torch.dtype
    device: torch.device

    def tile(self, first: int, last: int, queries: np.ndarray) -> Tile:
        high = int((queries[:, -1] + 1 - self.base).max())
        low = self._low(queries)
        if queries.size == 1:
            return Tile(first, last, low, high, None)
        keys = self.base[:, None, None] + np.arange(low, high)
        return Tile(first, last, low, high, self._additive(keys <= queries[:, :, None], keys, queries))

    def sealed_tile(self, first: int, last: int, queries: np.ndarray, raw_base: np.ndarray, block_size: int) -> Tile:
        """A query sees the sealed keys of earlier blocks and the raw ones of its own."""
        own = queries // block_size
        high = min(max(int((own[:, -1] * block_size - self.base).max()), 0), self.width)
        low = min(self._low(queries), high)
        begin = int((own[:, 0] * block_size - raw_base).min())
        raw = slice(begin, int((queries[:, -1] + 1 - raw_base).max()))
        if queries.size == 1:
            return Tile(first, last, low, high, None, self._raw_low(raw, queries, raw_base))
        sealed = self.base[:, None, None] + np.arange(low, high)
        fresh = raw_base[:, None, None] + np.arange(raw.start, raw.stop)
        seen = [sealed // block_size < own[:, :, None]]
        seen.append((fresh // block_size == own[:, :, None]) & (fresh <= queries[:, :, None]))
        keys = np.concatenate([sealed, fresh], axis=2)
        return Tile(first, last, low, high, self._additive(np.concatenate(seen, axis=2), keys, queries), raw)

    def _low(self, queries: np.ndarray) -> int:
        return max(int((queries[:, 0] - self.window + 1 - self.base).min()), 0) if self.window else 0

    def _raw_low(self, raw: slice, queries: np.ndarray, raw_base: np.ndarray) -> slice:
        """A window that is smaller than the block leaves out some raw keys too."""
        oldest = int(queries[0, 0]) - self.window + 1 - int(raw_base[0]) if self.window else 0
        return slice(max(raw.start, oldest), raw.stop)

    def _additive(self, seen: np.ndarray, keys: np.ndarray, queries: np.ndarray) -> Tensor:
        if self.window:
            seen = seen & (keys > queries[:, :, None] - self.window)
        mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~torch.from_numpy(seen), -torch.inf)
        return mask.to(self.device)[:, None].repeat(1, 1, self.share, 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """All tokens of a step: ids, positions and where their KV goes, each [tokens]; and the rows whose logits count."""

    token_ids: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    groups: tuple[Group, ...]
    rows: Tensor
    """Indices of tokens, in the order of the spans as given."""
    raw: Raw | None
    """None where keys are not sealed."""


def build(spans: Sequence[Span], block_size: int, device: torch.device, ring: int = 0) -> Batch:
    """The batch of valid `spans` (at least one). `ring`: positions per slot of the tail; 0: keys are not sealed."""
    grouped = _grouped(spans)
    begins = np.zeros(len(spans), dtype=np.int64)
    groups, at = [], 0
    order = [spans[i] for members in grouped for i in members]
    for members in grouped:
        lengths = [len(spans[i].token_ids) for i in members]
        begins[members] = at + np.cumsum([0, *lengths[:-1]])
        groups.append(_group([spans[i] for i in members], lengths, at, device))
        if ring:
            done = sum(g.sequences for g in groups[:-1])
            groups[-1].raw_lead = (done + np.arange(len(members))) * block_size
            groups[-1].raw_new = len(order) * block_size + begins[members]
        at += sum(lengths)
    positions = np.concatenate([np.arange(s.start, s.start + len(s.token_ids)) for s in order])
    blocks = [np.asarray(s.table)[np.arange(s.start, s.start + len(s.token_ids)) // block_size] for s in order]
    rows = [begins[i] + np.arange(len(s.token_ids) - s.rows, len(s.token_ids)) for i, s in enumerate(spans)]

    def moved(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(device)

    return Batch(
        token_ids=moved(np.concatenate([np.asarray(s.token_ids) for s in order])),
        positions=moved(positions),
        blocks=moved(np.concatenate(blocks)),
        offsets=moved(positions % block_size),
        groups=tuple(groups),
        rows=moved(np.concatenate(rows)),
        raw=_raw_of(order, block_size, ring, moved) if ring else None,
    )


def _raw_of(spans: Sequence[Span], size: int, ring: int, moved: Callable[[np.ndarray], Tensor]) -> Raw:
    lead, seal_blocks, seal_rows, keep_rows, keep_at = [], [], [], [], []
    new = len(spans) * size  # row of the current span's first new token
    for i, span in enumerate(spans):
        begin, end = span.start // size * size, span.start + len(span.token_ids)
        positions = np.arange(begin, max(end, begin + size))
        rows = np.where(positions < span.start, i * size + positions - begin, new + positions - span.start)
        lead.append(span.slot * ring + positions[:size] % ring)
        full = end // size * size - begin
        seal_blocks.append(np.asarray(span.table[begin // size : end // size], dtype=np.int64))
        seal_rows.append(rows[:full])
        kept = np.arange(max(span.start, end - ring), end)
        keep_rows.append(rows[kept - begin])
        keep_at.append(span.slot * ring + kept % ring)
        new += len(span.token_ids)
    return Raw(*(moved(np.concatenate(parts)) for parts in (lead, seal_blocks, seal_rows, keep_rows, keep_at)))


def _grouped(spans: Sequence[Span]) -> list[list[int]]:
    """Indices of the spans of each group: long spans alone, short ones with others of similar context length."""
    ends = [s.start + len(s.token_ids) for s in spans]
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(spans)), key=lambda i: -ends[i]):
        if len(spans[i].token_ids) > SHORT:
            groups.insert(0, [i])
        elif longest and longest - ends[i] <= max(_SLACK, longest // 4):
            groups[-1].append(i)
        else:
            groups.append([i])
            longest = ends[i]
    return groups


def _group(spans: Sequence[Span], lengths: list[int], at: int, device: torch.device) -> Group:
    width, total = max(lengths), sum(lengths)
    starts = np.array([s.start for s in spans], dtype=np.int64)
    pick = unpick = None
    if min(lengths) < width:
        begins = np.cumsum([0, *lengths[:-1]])
        column = np.minimum(np.arange(width), np.array(lengths)[:, None] - 1)
        pick = torch.from_numpy((begins[:, None] + column).reshape(-1)).to(device)
        kept = np.arange(width) < np.array(lengths)[:, None]
        unpick = torch.from_numpy(np.flatnonzero(kept)).to(device)
    return Group(
        tokens=slice(at, at + total),
        width=width,
        starts=starts,
        ends=starts + np.array(lengths),
        tables=[s.table for s in spans],
        pick=pick,
        unpick=unpick,
        device=device,
    )


def _padded(tables: Sequence[tuple[int, ...]], first: np.ndarray, last: np.ndarray, count: int) -> list[int]:
    """`count` blocks of each table, from number `first` to before `last` and then padding, which repeats a block of the
    same sequence: what another one holds must not even be multiplied by zero."""
    padded: list[int] = []
    for table, low, high in zip(tables, first, last, strict=True):
        padded += [*table[low:high], *table[:1] * (count - (high - low))]
    return padded
