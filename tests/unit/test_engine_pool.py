"""The layout of a block and the pool's byte access."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from pathlib import Path

import pytest
import torch

from shared.engine import pool as pools
from shared.engine.codecs.base import Codec, LayerShape
from shared.engine.codecs.none import Raw
from shared.engine.codecs.registry import CODECS
from shared.engine.pool import BlockLayout, KVPool
from shared.errors import ConfigError, FrameError

SHAPES = [LayerShape(3, 64, 64), LayerShape(1, 5, 3), LayerShape(2, 8, 16)]
CPU = torch.device("cpu")
MiB = 1 << 20


def kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])


def tensors(pool: KVPool) -> list[torch.Tensor]:
    return [view for layer in pool.layers for view in layer.views.values()]


def make(blocks: int = 4, block_size: int = 4) -> KVPool:
    return KVPool(SHAPES, blocks, block_size, torch.float32, CPU, Raw())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_parts_are_aligned_and_disjoint_and_fill_the_block(block_size: int, codec: Codec, dtype: torch.dtype) -> None:
    layout = BlockLayout.of(SHAPES, block_size, dtype, codec)
    parts = [part for layer in layout.layers for part in layer]
    ends = [p.offset + math.prod(p.field.shape) * p.field.dtype.itemsize for p in parts]
    assert all(p.offset % 16 == 0 for p in parts) and layout.block_bytes % 16 == 0
    for end, following in zip(ends, [*(p.offset for p in parts[1:]), layout.block_bytes], strict=True):
        assert end <= following < end + 16


def test_a_block_is_one_run_of_bytes_holding_exactly_its_layers() -> None:
    pool = make()
    for layer in range(len(SHAPES)):
        pool.layers[layer].views["keys"][2] = layer + 1
        pool.layers[layer].views["values"][2] = -layer - 1
    numbers = torch.frombuffer(bytearray(pool.block(2)), dtype=torch.float32)
    expected = [
        torch.full((4 * s.kv_heads * dim,), float(sign * (i + 1)))
        for i, s in enumerate(SHAPES)
        for sign, dim in ((1, s.k_dim), (-1, s.v_dim))
    ]
    assert torch.equal(numbers, torch.cat(expected))
    assert not any(bytes(pool.block(1))) and not any(bytes(pool.block(3)))


def test_blocks_travel_between_pools() -> None:
    one, two = make(), make()
    for tensor in tensors(one):
        tensor[1].normal_()
    two.write(3, bytes(one.block(1)))
    assert all(torch.equal(a[1], b[3]) for a, b in zip(tensors(one), tensors(two), strict=True))
    two.write(0, memoryview(bytearray(one.block(1))))
    assert bytes(two.block(0)) == bytes(one.block(1))


def test_reading_is_a_view_that_cannot_be_written() -> None:
    pool = make()
    view = pool.block(1)
    pool.layers[0].views["keys"][1] = 1.0
    assert any(view)
    assert view.readonly and view.nbytes == pool.block_bytes and view.contiguous
    with pytest.raises(TypeError):
        view[0] = 1


def test_wrong_sizes_and_places_are_refused_and_change_nothing() -> None:
    pool = make()
    size = pool.block_bytes
    for data in (b"", b"\1" * (size - 1), b"\1" * (size + 1), memoryview(b"\1" * (2 * size))[::2]):
        with pytest.raises(FrameError):
            pool.write(1, data)
    for index in (-1, 4):
        with pytest.raises(FrameError):
            pool.write(index, b"\1" * size)
        with pytest.raises(FrameError):
            pool.block(index)
    assert not any(bytes(pool.block(b)) != bytes(size) for b in range(4))


def test_a_block_can_be_cleared() -> None:
    pool = make()
    pool.write(2, b"\xff" * pool.block_bytes)
    pool.clear(2)
    assert not any(bytes(pool.block(2)))


def taken_by_a_pool(mib: int) -> int:
    """MiB of memory that a pool of so many takes before its first use."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    held = KVPool([LayerShape(3, 64, 64)] * 30, mib * MiB // 737_280, 16, torch.float32, CPU, Raw())
    assert held.block_bytes == 737_280
    return (resident() - before) // MiB


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
class TestMemory:
    def test_an_unused_pool_that_is_large_takes_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pools, "_available", lambda: 8 * 200 * MiB)
        assert taken_by_a_pool(210) < 40

    @pytest.mark.skipif(kernel() < (5, 14), reason="needs MADV_POPULATE_WRITE, of Linux 5.14")
    def test_a_small_one_is_taken_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pools, "_available", lambda: 8 * 200 * MiB)
        assert taken_by_a_pool(190) > 180

    def test_what_the_system_has(self, tmp_path: Path) -> None:
        says = tmp_path / "meminfo"
        assert pools._available(says, tmp_path) == 0
        for text, expected in (
            ("MemTotal:  16 kB\nMemAvailable:    2048 kB\nHugePages_Total:   0\n", 2 * MiB),
            ("MemTotal:  16 kB\n", 0),
            ("MemAvailable:\n", 0),
            ("MemAvailable: many kB\n", 0),
            ("nonsense\n", 0),
        ):
            says.write_text(text)
            assert pools._available(says, tmp_path) == expected
        says.write_text("MemAvailable: 2048 kB\n")
        for limit, used, least in (("max", "1", 2 * MiB), ("1048576", "48576", 1_000_000), ("10", "20", 0)):
            (tmp_path / "memory.max").write_text(f"{limit}\n")
            (tmp_path / "memory.current").write_text(f"{used}\n")
            assert pools._available(says, tmp_path) == least
        assert pools._available() > 100 * MiB


def test_a_pool_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="MiB"):
        make(blocks=1 << 50)
