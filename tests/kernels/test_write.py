"""What kernels write is what the codecs write, bit for bit, whatever the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.engine.codecs.base import LayerShape, PerBlock, PerToken
from shared.engine.codecs.registry import CODECS
from shared.engine.pool import KVPool, Tails
from shared.engine.span import Span
from shared.kernels.meta import StepMeta
from shared.kernels.seal import keep, seal
from shared.kernels.write import write
from tests.kernels.rig import CPU

B = 16
SHAPE = LayerShape(3, 72, 40)  # 3 and 2 groups of values; halves that are no powers of two


def numbers(tokens: int, dim: int) -> Tensor:
    """Rows of every kind, [tokens, kv_heads, dim]."""
    x = torch.randn(tokens, SHAPE.kv_heads, dim, generator=torch.Generator().manual_seed(dim))
    x *= torch.logspace(-3, 3, tokens)[:, None, None]
    x[1] = 0.0
    x[2] = 3.25
    x[3, :, 5] = 4000.0  # one outlier
    x[4] *= 1e30
    x[5] *= 1e-30
    x[6] = torch.finfo(torch.float32).max
    x[7] = torch.arange(dim) % 16 - 8.0  # exact codes and ties
    x[8] = -x[7].abs()
    x[9] = 1e-42  # subnormal
    return x


@pytest.mark.parametrize("codec", CODECS)
def test_any_finite_numbers(codec: str) -> None:
    pool, mirror = written(codec, numbers(2 * B, SHAPE.k_dim), numbers(2 * B, SHAPE.v_dim))
    assert torch.equal(pool._storage, mirror._storage)
    shape, every = SHAPE, torch.arange(2)
    for kv in pool.layers:
        assert kv.codec.read_keys(kv.views, every, shape, torch.float32).isfinite().all()
        assert kv.codec.read_values(kv.views, every, shape, torch.float32).isfinite().all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_nan_is_read_as_one_and_spoils_no_neighbour(codec: str, bad: float) -> None:
    """And what is infinite is read as the codec reads its own."""
    key, value = torch.randn(2, 2 * B, SHAPE.kv_heads, 40, generator=torch.Generator().manual_seed(0))
    key = torch.nn.functional.pad(key, (0, 32))
    key[3, 1, 7] = value[3, 1, 7] = bad
    pool, mirror = written(codec, key, value)
    for kv, other in zip(pool.layers, mirror.layers, strict=True):
        for read in (kv.codec.read_keys, kv.codec.read_values):
            got, expected = (read(x.views, torch.arange(2), SHAPE, torch.float32) for x in (kv, other))
            assert torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def written(codec: str, key: Tensor, value: Tensor) -> tuple[KVPool, KVPool]:
    """Two blocks in the pools' second layer: by kernels, in two steps; and by the codec."""
    what = CODECS[codec]
    tails = Tails.of(what, 1, 4, B)
    pool, mirror = (KVPool([SHAPE] * 2, 2, B, torch.float32, CPU, what, tails) for _ in range(2))
    kv, other = pool.layers[1], mirror.layers[1]
    for first, last in ((0, 21), (21, 2 * B)):
        meta = StepMeta.of([Span((1,) * (last - first), first, (1, 0))], B, CPU, tails.ring)
        write(kv, meta, key[first:last], value[first:last]).run()
        if isinstance(what, PerBlock):
            seal(kv, meta, key[first:last]).run()
            keep(kv, meta, key[first:last]).run()
    blocks, offsets = torch.tensor([1, 0]).repeat_interleave(B), torch.arange(B).repeat(2)
    what.write_values(other.views, blocks, offsets, value)
    if isinstance(what, PerToken):
        what.write_keys(other.views, blocks, offsets, key)
    if isinstance(what, PerBlock):
        what.seal_keys(other.views, torch.tensor([1, 0]), key.view(2, B, *key.shape[1:]))
    return pool, mirror
