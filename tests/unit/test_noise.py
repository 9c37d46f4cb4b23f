"""The noise is Philox4x32-10, Gumbel distributed, and a pure function of seed, position and token id."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shared.sampling.noise import MAX_GUMBEL, _to_gumbel, gumbel, gumbel_of, gumbel_rows, philox4x32

# The three philox4x32-10 lines of Random123's tests/kat_vectors: counter, key, output.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
SEEDS = st.integers(-(2**63), 2**64 - 1)
POSITIONS = st.integers(0, 2**40)


def words(line: str) -> list[int]:
    return [int(word, 16) for word in line.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    k0, k1 = words(key)
    c0, c1, c2, c3 = words(counter)
    assert list(philox4x32((c0, c1, c2, c3), (k0, k1))) == words(answer)
    tensors = tuple(torch.tensor([word, word]) for word in (c0, c1, c2, c3))
    output = philox4x32(tensors, (k0, k1))  # type: ignore[arg-type]
    assert [word.tolist() for word in output] == [[word, word] for word in words(answer)]  # type: ignore[union-attr]


def test_counter_layout() -> None:
    """The layout that other implementations (Triton's `tl.philox`) must follow, spelled out once more."""
    seed, position, token = 0x0123456789ABCDEF, 5 + (7 << 32), 1234
    word = philox4x32((token // 4, 5, 7, 0x54524E45), (0x89ABCDEF, 0x01234567))[token % 4]
    u = (int(word) + 0.5) / 2**32
    assert gumbel(seed, position, torch.tensor([token])).item() == pytest.approx(-math.log(-math.log(u)), rel=1e-14)


def test_extreme_words_stay_finite_and_bounded() -> None:
    extremes = _to_gumbel(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))
    assert extremes.isfinite().all()
    assert extremes.tolist() == sorted(extremes.tolist())
    assert MAX_GUMBEL - 1e-5 < extremes.max().item() < MAX_GUMBEL


@given(SEEDS, POSITIONS, st.lists(st.integers(0, 999), min_size=1, max_size=300))
@settings(max_examples=60, deadline=None)
def test_a_subset_gets_the_noise_of_the_full_row(seed: int, position: int, ids: list[int]) -> None:
    row = gumbel_rows([seed], [position], 1000)[0]
    wanted = torch.tensor(ids)
    assert torch.equal(gumbel(seed, position, wanted), row[wanted])
    assert gumbel_of(seed, position, ids[0]) == pytest.approx(row[ids[0]].item(), rel=1e-12)


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 4097, 49152])
def test_rows_of_any_length_agree(vocab: int) -> None:
    rows = gumbel_rows([1, 2], [3, 4], vocab)
    assert rows.shape == (2, vocab)
    assert torch.equal(rows[1], gumbel_rows([2], [4], 49152)[0, :vocab])
    few = torch.arange(0, vocab, 7)
    assert torch.equal(rows[0][few], gumbel(1, 3, few))


def test_shapes_and_emptiness() -> None:
    assert gumbel_rows([], [], 8).shape == (0, 8)
    assert gumbel(1, 2, torch.tensor([], dtype=torch.int64)).shape == (0,)


@given(SEEDS, POSITIONS)
@settings(max_examples=50, deadline=None)
def test_seed_and_position_both_matter(seed: int, position: int) -> None:
    row = gumbel_rows([seed], [position], 8)
    for other in ((seed ^ 1, position), (seed ^ (1 << 40), position), (seed, position + 1), (seed, position + 2**32)):
        assert not torch.equal(gumbel_rows([other[0]], [other[1]], 8), row)


def test_signed_and_unsigned_seeds_are_the_same_64_bits() -> None:
    assert torch.equal(gumbel_rows([-1], [0], 64), gumbel_rows([2**64 - 1], [0], 64))


def test_the_distribution_is_gumbel() -> None:
    noise = gumbel_rows(range(4), range(4), 50_000).numpy().ravel()
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3
    assert stats.kstest(noise * 1.03, "gumbel_r").pvalue < 1e-3  # the test can tell


def test_no_correlation_between_positions_seeds_and_tokens() -> None:
    n, vocab = 12, 20_000
    across_positions = gumbel_rows([42] * n, range(n), vocab).numpy()
    across_seeds = gumbel_rows(range(n), [42] * n, vocab).numpy()
    limit = 4.5 / math.sqrt(vocab)
    for rows in (across_positions, across_seeds):
        correlations = np.corrcoef(rows)[np.triu_indices(n, 1)]
        assert np.abs(correlations).max() < limit
    for lag in (1, 2, 3, 4, 8):
        assert abs(np.corrcoef(across_seeds[0][:-lag], across_seeds[0][lag:])[0, 1]) < limit
