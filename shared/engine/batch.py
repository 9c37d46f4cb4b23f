"""A step's spans as one flat row of tokens, built once and used by every layer.

Tokens are ordered by group. A group is attended in one call: either several short spans of similar context length,
padded to a rectangle, or one long span, cut into tiles so that no tile looks at keys far behind its last query.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Queries `first:last` of each sequence of the group against its gathered keys `low:high`."""

    first: int
    last: int
    low: int
    high: int
    mask: Tensor | None
    """Additive, [sequences, 1, group * queries, keys]; None when every key counts for every query."""


@dataclass(frozen=True, slots=True)
class Gather:
    """What a group reads under one attention window: `blocks` [sequences * n] in order, and how to use them."""

    blocks: Tensor
    tiles: tuple[Tile, ...]


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
        last = -(-self.ends // block_size)
        count = int((last - first).max())
        blocks = [_padded(table[low:high], count) for table, low, high in zip(self.tables, first, last, strict=True)]
        base = first * block_size
        cuts = range(0, self.width, TILE) if self.sequences == 1 else (0,)
        step = TILE if self.sequences == 1 else self.width
        tiles = [self._tile(cut, min(cut + step, self.width), base, window, share, dtype) for cut in cuts]
        return Gather(torch.tensor(blocks, device=self.device).view(-1), tuple(tiles))

    def _tile(
        self, first: int, last: int, base: np.ndarray, window: int | None, share: int, dtype: torch.dtype
    ) -> Tile:
        queries = np.minimum(self.starts[:, None] + np.arange(first, last), self.ends[:, None] - 1)
        high = int((queries[:, -1] + 1 - base).max())
        low = max(int((queries[:, 0] - window + 1 - base).min()), 0) if window else 0
        if queries.size == 1:
            return Tile(first, last, low, high, None)
        keys = base[:, None, None] + np.arange(low, high)
        seen = keys <= queries[:, :, None]
        if window:
            seen &= keys > queries[:, :, None] - window
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~torch.from_numpy(seen), -torch.inf)
        mask = mask.to(self.device)[:, None].repeat(1, 1, share, 1)
        return Tile(first, last, low, high, mask)


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


def build(spans: Sequence[Span], block_size: int, device: torch.device) -> Batch:
    """The batch of valid `spans` (at least one)."""
    grouped = _grouped(spans)
    begins = np.zeros(len(spans), dtype=np.int64)
    groups, at = [], 0
    for members in grouped:
        lengths = [len(spans[i].token_ids) for i in members]
        begins[members] = at + np.cumsum([0, *lengths[:-1]])
        groups.append(_group([spans[i] for i in members], lengths, at, device))
        at += sum(lengths)
    order = [spans[i] for members in grouped for i in members]
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
    )


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


def _padded(blocks: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Padding repeats a block of the same sequence: what another one holds must not even be multiplied by zero."""
    return blocks + blocks[:1] * (count - len(blocks))
