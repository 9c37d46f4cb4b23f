"""A fake engine with large blocks: for limits that are counted in bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shared.engine.span import Span
from shared.errors import FrameError
from tests.fake_engine import EMPTY, FakeEngine


class WideEngine(FakeEngine):
    """As `FakeEngine`, but each token is kept `width` times, so that a block has 4 * block_size * width bytes.

    A block that comes from elsewhere must have every one of them.
    """

    def __init__(self, *, width: int, **options: Any) -> None:
        super().__init__(**options)
        info = self.info
        self._wide = np.full((info.kv_blocks, info.block_size, width), EMPTY, dtype="<u4")
        self._pool = self._wide[:, :, -1]
        self._own: set[int] = set()
        """Blocks computed here, where only the last of each token's copies is kept up to date, and those checked."""
        self.info = replace(info, block_bytes=info.block_bytes * width)

    def _span(self, span: Span) -> list[int]:
        size = self.info.block_size
        self._own |= set(span.table[span.start // size :])
        for block in span.table[: span.start // size]:
            if block not in self._own and (self._wide[block] != self._wide[block, :, -1:]).any():
                raise AssertionError("a block with bytes of another one")
            self._own.add(block)
        return super()._span(span)

    def read_block(self, block: int) -> memoryview:
        if block in self._own:
            self._wide[block] = self._pool[block, :, None]
        return self._wide[block].data.cast("B")

    def landing(self, block: int) -> memoryview:
        self._own.discard(block)
        return self._wide[block].data.cast("B")

    def write_block(self, block: int, data: bytes | memoryview) -> None:
        if len(data) != self.info.block_bytes:
            raise FrameError(f"{len(data)} bytes for a block of {self.info.block_bytes}")
        self._own.discard(block)
        self._wide[block] = np.frombuffer(data, dtype="<u4").reshape(self._wide.shape[1:])
