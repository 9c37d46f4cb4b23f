"""Kernels that write and attend, in Triton's interpreter, against the codecs' torch code and the float64 reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.attention import Features
from shared.engine.codecs.base import LayerShape
from shared.engine.codecs.registry import CODECS
from shared.engine.pool import BlockLayout
from shared.errors import InvalidField
from shared.kernels.attention import tiling_for
from shared.kernels.meta import Capacity, StepMeta
from tests.kernels.rig import CPU, LAYER, LOOKAHEAD, Rig

PREFILL = [(0, 20), (1, 3)]
MIXED = [(0, 1), (1, 30), (2, 16)]
VERIFY = [(2, 5), (0, 4), (1, 1)]
DECODE = [(0, 1), (1, 1), (2, 1)]

GQA = LayerShape(2, 16, 16)
BF16 = 2**-7
"""The interpreter cuts off what does not fit a bf16, where a GPU rounds."""
KINDS: dict[str, tuple[LayerShape, int, Features]] = {
    "gqa": (GQA, 6, Features(0.25)),
    "mha": (LayerShape(3, 12, 12), 3, Features(0.25)),
    "mqa-odd": (LayerShape(1, 7, 7), 7, Features(0.25)),
    "window": (GQA, 4, Features(0.25, window=9)),
    "softcap": (GQA, 4, Features(0.5, softcap=2.0)),
    "sinks": (GQA, 4, Features(0.25, sinks=torch.linspace(-2, 4, 4))),
    "wide-keys": (LayerShape(2, 24, 20), 4, Features(0.2)),
}
EVERY = list(itertools.product(CODECS, KINDS))
BLOCK_SIZES = [4, 12, 16, 32, 128]
PAIRS = [
    (codec, kind, BLOCK_SIZES[(i + j + skip) % 5])
    for (i, codec), (j, kind) in itertools.product(enumerate(CODECS), enumerate(KINDS))
    for skip in (0, 2)
]
"""Every two of a codec, a kind and a block size together."""
FAST = [(codec, kind) for codec, kind in EVERY if codec in ("none", "int4") or kind in ("gqa", "wide-keys")]


def error(codec: str, kind: str, steps: list[list[tuple[int, int]]], **rig: object) -> float:
    shape, heads, features = KINDS[kind]
    under_test = Rig(codec, shape, sequences=3, context=80, **rig)  # type: ignore[arg-type]
    worst = max(under_test.step(step, heads, features) for step in steps)
    assert under_test.same_bytes()
    return worst


@pytest.mark.parametrize(("codec", "kind"), FAST)
def test_prefill_decode_and_verification(codec: str, kind: str) -> None:
    assert error(codec, kind, [PREFILL, MIXED, VERIFY]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "kind", "block_size"), PAIRS)
def test_every_kind_and_block_size(codec: str, kind: str, block_size: int) -> None:
    steps = [PREFILL, MIXED, VERIFY, DECODE]
    assert error(codec, kind, steps, block_size=block_size) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_sizes(codec: str, dim: int) -> None:
    rig = Rig(codec, LayerShape(2, dim, dim), sequences=3, context=80)
    assert max(rig.step(step, 8, Features(dim**-0.5)) for step in (PREFILL, MIXED, VERIFY)) < 2e-5
    assert rig.same_bytes()


@pytest.mark.parametrize(("codec", "dim"), [("int8", 80), ("int4", 80), ("int4", 96)])
def test_head_sizes_that_are_no_powers_of_two(codec: str, dim: int) -> None:
    rig = Rig(codec, LayerShape(1, dim, dim), sequences=1, context=40)
    assert max(rig.step([(0, n)], 2, Features(dim**-0.5)) for n in (17, 2)) < 2e-5
    assert rig.same_bytes()


@pytest.mark.parametrize("codec", CODECS)
def test_bf16(codec: str) -> None:
    """What is read and the result. In the interpreter all between is fp32."""
    assert error(codec, "gqa", [PREFILL, VERIFY], dtype=torch.bfloat16) < BF16


FEATURES = Features(0.25, window=300, sinks=torch.linspace(-2, 4, 2))


@pytest.mark.parametrize("codec", ["none", "int4"])
@pytest.mark.parametrize("features", [Features(0.25), FEATURES], ids=["plain", "window-sinks"])
def test_long_contexts_are_split_and_merged(codec: str, features: Features) -> None:
    rig = Rig(codec, LayerShape(1, 16, 16), sequences=2, context=560)
    rig.begin(0, 530)
    rig.begin(1, 250)
    assert rig.step([(0, 3), (1, 10)], 2, features) < 1e-5  # one ends at 533, one crosses 256
    capacity = Capacity(tokens=2, sequences=2, queries=1, blocks=64, rows=2)
    assert rig.step([(0, 1), (1, 1)], 2, features, capacity) < 1e-5
    assert rig.same_bytes()


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_steps_of_fixed_capacity_pad(codec: str) -> None:
    """Padded tokens and sequences write nothing, see nothing and come out as zeros, split or not."""
    rig = Rig(codec, GQA, sequences=3, context=80)
    for blocks in (16, 64):
        capacity = Capacity(tokens=40, sequences=5, queries=24, blocks=blocks, rows=8)
        assert rig.step([(0, 20), (2, 3)], 4, Features(0.25), capacity) < 1e-5
        decode = Capacity(tokens=8, sequences=4, queries=4, blocks=blocks, rows=8)
        assert rig.step([(2, 1), (1, 3)], 4, Features(0.25), decode) < 1e-5
    assert rig.same_bytes()


def test_what_does_not_fit_the_capacity_is_refused() -> None:
    rig = Rig("none", GQA, sequences=2, context=300)
    capacity = Capacity(tokens=8, sequences=1, queries=4, blocks=16, rows=1)
    for shares, field in (([(0, 5)], "queries"), ([(0, 4), (1, 1)], "sequences")):
        with pytest.raises(InvalidField) as caught:
            rig.step(shares, 2, Features(0.25), capacity)
        assert caught.value.field == field


@pytest.mark.parametrize("codec", CODECS)
def test_guesses_are_taken_back_and_overwritten(codec: str) -> None:
    """Also across the end of a block, which is then sealed anew."""
    rig = Rig(codec, GQA, sequences=1, context=64)
    features = Features(0.25)
    worst = [rig.step([(0, 13)], 4, features), rig.step([(0, 7)], 4, features)]
    rig.rewind(0, 5)
    worst += [rig.step([(0, 2)], 4, features), rig.step([(0, 1 + LOOKAHEAD)], 4, features)]
    assert max(worst) < 1e-5 and rig.same_bytes()


@pytest.mark.parametrize("codec", CODECS)
def test_offsets_beyond_32_bits(codec: str) -> None:
    """In numbers of the pool's smallest field. Only memory that is touched is taken."""
    dtype = torch.bfloat16 if codec == "none" else torch.float32
    layout = BlockLayout.of([GQA] * 2, 16, dtype, CODECS[codec])
    smallest = min(part.field.dtype.itemsize for part in layout.layers[0])
    blocks = 2**31 * smallest // layout.block_bytes + 10
    rig = Rig(codec, GQA, sequences=2, context=48, dtype=dtype, blocks=blocks)
    worst = [rig.step([(0, 33), (1, 2)], 4, Features(0.25)), rig.step([(0, 1), (1, 3)], 4, Features(0.25))]
    assert max(worst) < (BF16 if codec == "none" else 1e-5) and rig.same_bytes()


@settings(max_examples=12, deadline=None)
@given(
    codec=st.sampled_from(list(CODECS)),
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=3, unique_by=lambda s: s[0]),
        min_size=1,
        max_size=3,
    ),
    window=st.none() | st.integers(1, 40),
)
def test_any_ragged_steps(codec: str, steps: list[list[tuple[int, int]]], window: int | None) -> None:
    rig = Rig(codec, LayerShape(1, 8, 8), sequences=3, context=64, block_size=8)
    assert max(rig.step(step, 2, Features(0.3, window)) for step in steps) < 1e-5
    assert rig.same_bytes()


def test_how_a_step_is_cut_depends_on_its_capacity_alone() -> None:
    """A captured grid is replayed for other lengths; splits lie at fixed positions."""
    rig = Rig("none", GQA, sequences=1, context=16)
    kv = rig.pool.layers[LAYER]
    for context, splits in ((256, 1), (512, 2), (4096, 16), (1 << 17, 32)):
        capacity = Capacity(tokens=4, sequences=2, queries=4, blocks=context // 16, rows=4)
        tiling = tiling_for(kv, StepMeta(capacity, 16, CPU), heads=8, itemsize=2, hip=False)
        assert (tiling.splits, tiling.splits * tiling.split_size) == (splits, context)
