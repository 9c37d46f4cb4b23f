"""A step's spans on the device: one copy of integers, built once and read by every kernel of every layer.

Kernels take all lengths from here and their grids from `Capacity` alone. So a captured graph is replayed with new
contents after `StepMeta.load`, and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.engine.span import Span
from shared.errors import InvalidField
from shared.kernels.call import power_of_two

_LEAST_BLOCKS = 16
_ALIGN = 16  # bytes


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest step that fits. `queries` and `blocks`: of one sequence; `blocks` is a power of two, 16 or more, so
    that kernels are compiled for few of them."""

    tokens: int
    sequences: int
    queries: int
    blocks: int
    rows: int

    @classmethod
    def of(cls, spans: Sequence[Span], block_size: int) -> Capacity:
        """Just enough for `spans`."""
        lengths = [len(span.token_ids) for span in spans]
        longest = max(span.start + length for span, length in zip(spans, lengths, strict=True))
        return cls(
            tokens=sum(lengths),
            sequences=len(spans),
            queries=max(lengths),
            blocks=max(_LEAST_BLOCKS, power_of_two(-(-longest // block_size))),
            rows=sum(span.rows for span in spans),
        )

    def check(self, spans: Sequence[Span], block_size: int) -> None:
        """Raises InvalidField when `spans` do not fit."""
        need = Capacity.of(spans, block_size)
        for name in ("tokens", "sequences", "queries", "blocks", "rows"):
            if getattr(need, name) > getattr(self, name):
                raise InvalidField(
                    f"a step of {getattr(need, name)} {name} does not fit into {getattr(self, name)}", field=name
                )


class StepMeta:
    """Tokens and sequences in the order of the spans. What is padding beyond them belongs to no sequence.

    token_ids, positions [tokens] int64, `rows` [rows] int64: indices of the tokens whose logits count (padding: 0).
    token_blocks, token_offsets [tokens] int32: where a token's KV goes; block -1 is padding.
    keep_at [tokens] int32: the row of the tail where a token's raw key goes when the step is done, or -1.
    query_starts [sequences + 1] int32: a sequence's first token; padded sequences have none.
    starts, slots [sequences] int32: the position of its first token, and its slot.
    tables [sequences, blocks] int32.
    """

    def __init__(self, capacity: Capacity, block_size: int, device: torch.device, ring: int = 0) -> None:
        """An empty step. `ring`: positions per slot of the tail; 0: keys are not sealed."""
        self.capacity, self.block_size, self.device, self.ring = capacity, block_size, device, ring
        self._places = _places(capacity)
        last = max(self._places.values(), key=lambda place: place.offset)
        self._buffer = torch.zeros(last.end, dtype=torch.uint8, device=device)
        self.token_ids, self.positions, self.rows = (self._view(name) for name in ("token_ids", "positions", "rows"))
        self.token_blocks, self.token_offsets = self._view("token_blocks"), self._view("token_offsets")
        self.keep_at, self.query_starts = self._view("keep_at"), self._view("query_starts")
        self.starts, self.slots, self.tables = self._view("starts"), self._view("slots"), self._view("tables")

    @classmethod
    def of(cls, spans: Sequence[Span], block_size: int, device: torch.device, ring: int = 0) -> StepMeta:
        """A step of just these valid spans (at least one)."""
        meta = cls(Capacity.of(spans, block_size), block_size, device, ring)
        meta.load(spans)
        return meta

    def load(self, spans: Sequence[Span]) -> None:
        """Replace the contents by `spans`, in one copy that the host does not wait for. Raises InvalidField."""
        self.capacity.check(spans, self.block_size)
        # Each step's host memory is its own: the last one's may still be in flight.
        host = torch.zeros(len(self._buffer), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        raw = host.numpy()
        arrays = {
            name: raw[place.offset : place.end].view(place.dtype)[: math.prod(place.shape)].reshape(place.shape)
            for name, place in self._places.items()
        }
        self._fill(arrays, spans)
        self._buffer.copy_(host, non_blocking=True)

    def _fill(self, arrays: dict[str, np.ndarray], spans: Sequence[Span]) -> None:
        size = self.block_size
        arrays["token_blocks"].fill(-1)
        arrays["keep_at"].fill(-1)
        begin = row = 0
        for i, span in enumerate(spans):
            length, blocks = len(span.token_ids), -(-(span.start + len(span.token_ids)) // size)
            here = slice(begin, begin + length)
            positions = np.arange(span.start, span.start + length)
            arrays["tables"][i, :blocks] = span.table[:blocks]
            arrays["token_ids"][here] = span.token_ids
            arrays["positions"][here] = positions
            arrays["token_blocks"][here] = arrays["tables"][i][positions // size]
            arrays["token_offsets"][here] = positions % size
            if self.ring:
                kept = positions >= span.start + length - self.ring
                arrays["keep_at"][here] = np.where(kept, span.slot * self.ring + positions % self.ring, -1)
            arrays["rows"][row : row + span.rows] = np.arange(begin + length - span.rows, begin + length)
            arrays["query_starts"][i], arrays["starts"][i], arrays["slots"][i] = begin, span.start, span.slot
            begin, row = begin + length, row + span.rows
        arrays["query_starts"][len(spans) :] = begin

    def _view(self, name: str) -> Tensor:
        place = self._places[name]
        flat = self._buffer[place.offset : place.end].view(place.torch_dtype)
        return flat[: math.prod(place.shape)].view(place.shape)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an array lies in the buffer: bytes offset:end, aligned, so that kernels may load it in wide words."""

    offset: int
    end: int
    dtype: type[np.int32] | type[np.int64]
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.int64 if self.dtype is np.int64 else torch.int32


def _places(capacity: Capacity) -> dict[str, _Place]:
    tokens, sequences = (capacity.tokens,), (capacity.sequences,)
    wide = {"token_ids": tokens, "positions": tokens, "rows": (capacity.rows,)}
    narrow = {
        "token_blocks": tokens,
        "token_offsets": tokens,
        "keep_at": tokens,
        "query_starts": (capacity.sequences + 1,),
        "starts": sequences,
        "slots": sequences,
        "tables": (capacity.sequences, capacity.blocks),
    }
    places: dict[str, _Place] = {}
    end = 0
    for name, shape in (wide | narrow).items():
        dtype = np.int64 if name in wide else np.int32
        size = -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        places[name] = _Place(end, end + size, dtype, shape)
        end += size
    return places
