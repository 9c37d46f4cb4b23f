"""KV codecs: what is read is close to what was written, always finite, and the same bytes whoever writes it."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.engine.codecs.base import Codec, LayerShape, PerBlock, PerToken
from shared.engine.codecs.int4 import Int4
from shared.engine.codecs.packing import from_small_float, pack, to_small_float, unpack
from shared.engine.codecs.registry import CODECS, codec_of
from shared.engine.codecs.scaled import Fp8E4M3, Int8
from shared.engine.pool import BlockLayout, KVPool
from shared.errors import ConfigError

CPU = torch.device("cpu")
B = 16
SMOLLM2 = LayerShape(3, 64, 64)
SHAPES = [SMOLLM2, LayerShape(1, 1, 1), LayerShape(2, 5, 3), LayerShape(1, 33, 65), LayerShape(4, 24, 16)]
QUANTISED = [Int8(), Fp8E4M3(), Int4()]

each = pytest.mark.parametrize("codec", QUANTISED, ids=lambda codec: codec.name)


def pool_of(codec: Codec, shape: LayerShape, blocks: int, dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool([shape], blocks, B, dtype, CPU, codec)


def write(pool: KVPool, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
    """Whole blocks: keys [n, B, kv_heads, k_dim], values alike."""
    layer = pool.layers[0]
    owners, offsets = blocks.repeat_interleave(B), torch.arange(B).repeat(len(blocks))
    layer.codec.write_values(layer.views, owners, offsets, values.flatten(0, 1))
    if isinstance(layer.codec, PerToken):
        layer.codec.write_keys(layer.views, owners, offsets, keys.flatten(0, 1))
    elif isinstance(layer.codec, PerBlock):
        layer.codec.seal_keys(layer.views, blocks, keys)


def read(pool: KVPool, blocks: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    layer = pool.layers[0]
    keys = layer.codec.read_keys(layer.views, blocks, layer.shape, dtype)
    return keys, layer.codec.read_values(layer.views, blocks, layer.shape, dtype)


def round_trip(codec: Codec, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    shape = LayerShape(keys.shape[2], keys.shape[3], values.shape[3])
    blocks = torch.arange(2 * len(keys) - 1, 0, -2)  # scattered, falling
    pool = pool_of(codec, shape, 2 * len(keys))
    write(pool, blocks, keys, values)
    return read(pool, blocks)


def random(shape: LayerShape, n: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(n, B, shape.kv_heads, shape.k_dim), torch.randn(n, B, shape.kv_heads, shape.v_dim)


def allowed(codec: Codec, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest error of each number, from how it is coded."""
    if isinstance(codec, Int4):
        keys, values = keys.clamp(-65504, 65504), values.clamp(-65504, 65504)
        low, high = keys.amin(1, keepdim=True), keys.amax(1, keepdim=True)
        spread = high - low
        unit = spread.amax(-1, keepdim=True) / 15 / 1.9375
        # Half a step, the clipped end, the minimum in float16, and steps below what the head's unit can express.
        k = spread * (33 / 32 / 30 + 1 / 64) + torch.maximum(low.abs(), high.abs()) * 2**-11 + unit * 2**-15 + 1e-6
        groups = -(-values.shape[-1] // 32)
        padded = torch.nn.functional.pad(values, (0, groups * 32 - values.shape[-1])).unflatten(-1, (groups, 32))
        extent = (padded.amax(-1).clamp_min(0) - padded.amin(-1).clamp_max(0)).repeat_interleave(32, -1)
        return k, extent[..., : values.shape[-1]] * (17 / 16 / 30 + 1 / 16) + 2e-4
    return _per_row(codec, keys), _per_row(codec, values)


def _per_row(codec: Codec, numbers: Tensor) -> Tensor:
    largest = numbers.abs().amax(-1, keepdim=True)
    if isinstance(codec, Int8):
        return (largest / 254 * 1.00001).expand_as(numbers) + 2e-38
    return torch.maximum(numbers.abs() / 16, largest / 448 * 2**-10) * 1.00001 + 2e-38


@each
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_what_is_read_is_within_half_a_step(codec: Codec, shape: LayerShape, scale: float) -> None:
    keys, values = (scale * numbers for numbers in random(shape))
    for got, given_, most in zip(
        round_trip(codec, keys, values), (keys, values), allowed(codec, keys, values), strict=True
    ):
        assert got.shape == given_.shape and got.dtype == torch.float32
        assert ((got - given_).abs() <= most).all()


@pytest.mark.parametrize(
    ("codec", "key", "value"), [(Int8(), 0.007, 0.007), (Fp8E4M3(), 0.028, 0.028), (Int4(), 0.07, 0.085)]
)
def test_the_error_of_ordinary_numbers(codec: Codec, key: float, value: float) -> None:
    keys, values = random(SMOLLM2, 40)
    k, v = round_trip(codec, keys, values)
    assert (k - keys).square().mean().sqrt() < key
    assert (v - values).square().mean().sqrt() < value


@pytest.mark.parametrize(("name", "most"), [("int8", 0.54), ("fp8_e4m3", 0.54), ("int4", 0.31)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_token_relative_to_fp16(name: str, most: float, dtype: torch.dtype) -> None:
    """Scales and padding included, at the default model's shape."""
    layout = BlockLayout.of([SMOLLM2] * 30, B, dtype, CODECS[name])
    assert layout.block_bytes <= most * 30 * B * 2 * 3 * (64 + 64)


@each
def test_a_block_of_zeros_stays_zero(codec: Codec) -> None:
    """Also beside other blocks, and where nothing was ever written. No 0/0."""
    keys, values = random(SMOLLM2)
    keys[2], values[2] = 0, 0
    k, v = round_trip(codec, keys, values)
    assert not k[2].any() and not v[2].any()
    for numbers in read(pool_of(codec, SMOLLM2, 2), torch.tensor([1])):
        assert not numbers.any()


@each
@pytest.mark.parametrize("constant", [1.0, -3.7, 1e-9, 6e4, -6e4])
def test_a_constant_block(codec: Codec, constant: float) -> None:
    full = torch.full((2, B, 3, 64), constant)
    for numbers in round_trip(codec, full, full):
        assert numbers.isfinite().all()
        assert (numbers - constant).abs().max() <= abs(constant) / 15 + 1e-5


@each
def test_one_outlier_in_a_block(codec: Codec) -> None:
    keys, values = random(SMOLLM2)
    keys[1, 3, 2, 7] = values[1, 3, 2, 7] = 3e4
    k, v = round_trip(codec, keys, values)
    assert k.isfinite().all() and v.isfinite().all()
    assert k[1, 3, 2, 7] == pytest.approx(3e4, rel=0.07) and v[1, 3, 2, 7] == pytest.approx(3e4, rel=0.1)
    most_k, most_v = allowed(codec, keys, values)
    assert ((k - keys).abs() <= most_k).all() and ((v - values).abs() <= most_v).all()
    others = torch.ones(B, dtype=torch.bool)
    others[3] = False
    assert (v - values)[1, others].abs().max() < 0.5  # what it costs its own token, it does not cost another


@each
def test_the_values_that_eight_bit_floats_lose(codec: Codec) -> None:
    """e4m3 ends at 448 and has no infinity."""
    special = torch.tensor([0.0, 1e-9, 447.0, 449.0, 464.1, 6e4, -6e4, -449.0])
    for numbers in (special, special[:5], special[:2], -special):
        row = torch.nn.functional.pad(numbers, (0, 64 - len(numbers)))
        block = row.expand(1, B, 3, 64).clone()
        for got, most in zip(round_trip(codec, block, block), allowed(codec, block, block), strict=True):
            assert got.isfinite().all()
            assert ((got - block).abs() <= most).all()


@each
def test_what_is_too_large_saturates(codec: Codec) -> None:
    block = torch.full((1, B, 1, 64), 3e38)
    block[..., ::2] *= -1
    block[0, 1::2] *= -1
    for got in round_trip(codec, block, block):
        assert got.isfinite().all() and (got.abs() > 6e4).all() and torch.equal(got.sign(), block.sign())


@each
def test_nan_stays_nan_and_stays_where_it_is(codec: Codec) -> None:
    """A model that breaks is noticed by its output, which must not become finite on the way."""
    keys, values = random(SMOLLM2)
    clean_keys, clean_values = round_trip(codec, keys, values)
    keys[1, 2, 0, 5] = values[1, 2, 0, 5] = torch.nan
    k, v = round_trip(codec, keys, values)
    assert k[1, 2, 0, 5].isnan() and v[1, 2, 0, 5].isnan()
    assert torch.equal(k[:, :, 1:], clean_keys[:, :, 1:]) and torch.equal(k[2:], clean_keys[2:])
    assert torch.equal(v[1, 3:], clean_values[1, 3:]) and torch.equal(v[2:], clean_values[2:])


finite = st.floats(-6.5e4, 6.5e4, width=32) | st.sampled_from([0.0, 1e-30, -1e-9, 448.0, 1e-40])


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(finite, min_size=1, max_size=40),
    shape=st.sampled_from(SHAPES),
    codec=st.sampled_from(QUANTISED),
    seed=st.integers(0, 1000),
)
def test_any_finite_numbers(numbers: list[float], shape: LayerShape, codec: Codec, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    some = torch.tensor(numbers, dtype=torch.float32)

    def drawn(dim: int) -> Tensor:
        return some[torch.randint(0, len(some), (2, B, shape.kv_heads, dim), generator=generator)]

    keys, values = drawn(shape.k_dim), drawn(shape.v_dim)
    for got, given_, most in zip(
        round_trip(codec, keys, values), (keys, values), allowed(codec, keys, values), strict=True
    ):
        assert got.isfinite().all()
        assert ((got - given_).abs() <= most).all()


@each
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_do_not_depend_on_company_or_order(codec: Codec, shape: LayerShape) -> None:
    keys, values = random(shape, 6)
    together, alone = pool_of(codec, shape, 6), pool_of(codec, shape, 6)
    write(together, torch.arange(6), keys, values)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    for block in order:
        one = block[None]
        layer = alone.layers[0]
        for offset in torch.randperm(B):
            layer.codec.write_values(layer.views, one, offset[None], values[one, offset])
            if isinstance(layer.codec, PerToken):
                layer.codec.write_keys(layer.views, one, offset[None], keys[one, offset])
        if isinstance(layer.codec, PerBlock):
            layer.codec.seal_keys(layer.views, one, keys[one].transpose(2, 3).contiguous().transpose(2, 3))
    for block in range(6):
        assert bytes(together.block(block)) == bytes(alone.block(block))


@each
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_the_blocks_named_are_written_and_read(codec: Codec, shape: LayerShape) -> None:
    keys, values = random(shape, 2)
    pool, other = pool_of(codec, shape, 5), pool_of(codec, shape, 3)
    poison = b"\xff" * pool.block_bytes
    for block in range(5):
        pool.write(block, poison)
    for block in (1, 3):
        pool.clear(block)  # the bytes between the arrays
    blocks = torch.tensor([3, 1])
    write(pool, blocks, keys, values)
    assert all(bytes(pool.block(block)) == poison for block in (0, 2, 4))
    got = read(pool, blocks)
    assert all(numbers.isfinite().all() for numbers in got)
    for here, there in ((0, 3), (2, 1)):  # the bytes are all there is to a block
        other.write(here, bytes(pool.block(there)))
    assert all(torch.equal(a, b) for a, b in zip(read(other, torch.tensor([0, 2])), got, strict=True))


@each
def test_numbers_of_a_bfloat16_model(codec: Codec) -> None:
    keys, values = (numbers.bfloat16() for numbers in random(SMOLLM2))
    pool = pool_of(codec, SMOLLM2, 5, torch.bfloat16)
    write(pool, torch.arange(5), keys, values)
    for got, exact in zip(
        read(pool, torch.arange(5), torch.bfloat16), round_trip(codec, keys.float(), values.float()), strict=True
    ):
        assert got.dtype == torch.bfloat16 and torch.equal(got, exact.bfloat16())


def test_int4_keys_lose_nothing_to_a_large_bias() -> None:
    """Qwen2's k_proj has biases beyond 100 on some channels: the others stay the same, and so does these' error."""
    keys, values = random(SMOLLM2, 40)
    keys = (keys * 1024).round() / 1024  # so that adding the bias is exact
    plain, _ = round_trip(Int4(), keys, values)
    biased = keys.clone()
    biased[..., 5] += 100
    biased[..., 40] -= 100
    got, _ = round_trip(Int4(), biased, values)
    others = [c for c in range(64) if c not in (5, 40)]
    assert torch.equal(got[..., others], plain[..., others])
    error = (got - biased)[..., [5, 40]].square().mean().sqrt()
    assert error < 1.15 * (plain - keys)[..., [5, 40]].square().mean().sqrt()


def test_a_scale_per_token_pays_for_a_large_channel() -> None:
    """Why int4 keys are not coded so: here the step is that of the largest channel."""
    keys, values = random(SMOLLM2)
    keys[..., 5] += 100
    got, _ = round_trip(Int8(), keys, values)
    assert (got - keys).square().mean().sqrt() > 0.2


def test_every_code_of_e4m3() -> None:
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(Fp8E4M3().decode(codes), codes.float())


@given(codes=st.lists(st.integers(0, 15), min_size=1, max_size=20))
def test_four_bit_codes_are_packed_and_unpacked(codes: list[int]) -> None:
    data = pack(torch.tensor([codes, codes[::-1]], dtype=torch.uint8))
    assert data.shape == (2, -(-len(codes) // 2))
    assert unpack(data, len(codes), torch.empty(2, len(codes))).tolist() == [codes, codes[::-1]]


def test_where_four_bit_codes_lie_in_a_byte() -> None:
    assert pack(torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)).tolist() == [0x41, 0x52, 0x03]


@pytest.mark.parametrize(("mantissa", "last", "largest"), [(4, 255, 1.9375), (3, 0xF7, 61440.0)])
def test_floats_of_eight_bits(mantissa: int, last: int, largest: float) -> None:
    numbers = from_small_float(torch.arange(last + 1, dtype=torch.uint8), mantissa)
    assert numbers[0] == 0 and numbers[-1] == largest
    assert (numbers.diff() > 0).all()
    assert to_small_float(numbers, mantissa).tolist() == list(range(last + 1))
    between = (numbers[1:] + numbers[:-1]) / 2
    assert to_small_float(between * 0.98, mantissa).tolist() == list(range(last))
    assert to_small_float(between * 1.02, mantissa).tolist() == list(range(1, last + 1))


GOLDEN = {
    "int8": "972eff95e3a87c81",
    "fp8_e4m3": "3eb84e0fb303692b",
    "int4": "44fc137bc804087c",
}


@each
def test_the_bytes_of_a_block_are_the_same_in_every_version(codec: Codec) -> None:
    """Blocks are shared between processes by name. If these must change, so must `LAYOUT_VERSION`."""
    shape = LayerShape(2, 7, 40)
    at = torch.arange(B * 2 * 40, dtype=torch.float32).view(1, B, 2, 40)
    numbers = ((at * 37) % 101 - 50) / 8
    pool = pool_of(codec, shape, 1)
    write(pool, torch.tensor([0]), numbers[..., :7], numbers)
    assert hashlib.sha256(pool.block(0)).hexdigest()[:16] == GOLDEN[codec.name]


def test_an_unknown_codec() -> None:
    with pytest.raises(ConfigError, match="none, int8, fp8_e4m3, int4"):
        codec_of("int3")
