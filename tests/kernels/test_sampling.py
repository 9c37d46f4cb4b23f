"""Sampling on the device takes the tokens that the CPU takes: kernels in Triton's interpreter, filters in torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels.sampling import _words
from shared.messages import Sampling
from shared.sampling.adjustments import Adjustments
from shared.sampling.device import Limits, choose, keep
from shared.sampling.filters import candidates
from shared.sampling.noise import MASK32, STREAM, philox4x32
from shared.sampling.params import Row
from shared.sampling.processing import adjusted
from shared.sampling.sampler import sample

GREEDY = Sampling(temperature=0.0)
SEEDS = st.one_of(st.sampled_from([0, -1, 2**64 - 1, 2**63, -(2**63), 2**32]), st.integers(-(2**63), 2**64 - 1))
POSITIONS = st.one_of(st.sampled_from([0, 2**31, 2**32 - 1, 2**32, 2**62]), st.integers(0, 2**63 - 1))
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 9.9e-6, 1e-5, 0.1, 0.7, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 2**31 - 1]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-300, 0.05, 0.5, 1.0]),
)


@triton.jit
def _words_of(seeds, positions, out, N: tl.constexpr):
    row = tl.program_id(0)
    counters = tl.arange(0, N)
    words = _words(tl.load(seeds + row), tl.load(positions + row), counters)
    for lane in tl.static_range(4):
        tl.store(out + (row * 4 + lane) * N + counters, words[lane].to(tl.int64))


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_the_words_of_noise_are_the_same_bits(keys: list[tuple[int, int]]) -> None:
    n = 64
    signed = [[(number + 2**63) % 2**64 - 2**63 for number in key] for key in keys]
    seeds, positions = torch.tensor(signed).t().contiguous()
    out = torch.zeros(len(keys), 4, n, dtype=torch.int64)
    _words_of[(len(keys),)](seeds, positions, out, N=n)
    for (seed, position), words in zip(keys, out, strict=True):
        counter = (torch.arange(n), position & MASK32, position >> 32, STREAM)
        expected = philox4x32(counter, (seed & MASK32, seed >> 32 & MASK32))
        assert words.tolist() == [torch.as_tensor(word).tolist() for word in expected]


@given(st.integers(0, 2**32), st.lists(st.tuples(SAMPLINGS, SEEDS, POSITIONS), min_size=1, max_size=5), st.data())
@settings(max_examples=25, deadline=None)
def test_tokens_are_those_of_the_cpu(seed: int, rows: list[tuple[Sampling, int, int]], data: st.DataObject) -> None:
    """Ties, masked tokens, vocabularies that end inside a program's share."""
    vocab = data.draw(st.sampled_from([1, 3, 40, 1024, 1025, 2500]))
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed)).mul(12).round().div(4)
    logits[:, 1:].masked_fill_(logits[:, 1:] > 6, -math.inf)
    drawn = [Row(*row) for row in rows]
    before = logits.clone()
    assert choose(logits, drawn).tolist() == sample(logits, drawn)
    assert torch.equal(logits, before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about the last row
def test_adjusted_rows_are_chosen_alike_and_one_without_candidates_is_marked() -> None:
    """Bias and penalties come before the kernels, by the same code on every device."""
    logits = torch.randn(4, 1500, generator=torch.Generator().manual_seed(6))
    penalised = Sampling(repetition_penalty=1.3, frequency_penalty=1, logit_bias={7: -100, 1400: 9.0}, min_tokens=2)
    nothing = Sampling(logit_bias=dict.fromkeys(range(1024), -100.0))
    samplings = [GREEDY, penalised, penalised.model_copy(update={"temperature": 0.0, "top_k": 5}), nothing]
    adjustments = [Adjustments.of(s, [1, 1400], [3], [1400]) for s in samplings]
    rows = [Row(s, 5, 4, a, (1400,)) for s, a in zip(samplings, adjustments, strict=True)]
    assert choose(adjusted(logits, rows), rows).tolist() == sample(logits, rows)
    logits[3, 1024:] = -math.inf
    assert choose(adjusted(logits, rows), rows).tolist() == [*sample(logits[:3], rows[:3]), -1]


def test_a_real_vocabulary() -> None:
    logits = torch.randn(1, 49152, generator=torch.Generator().manual_seed(3)) * 2
    rows = [Row(Sampling(temperature=1.5, top_k=4000), 12, 3)]
    assert choose(logits, rows).tolist() == sample(logits, rows)


def test_noise_decides_across_programs() -> None:
    """Flat logits: the winner is the largest noise of the whole vocabulary, wherever it is."""
    rows = [Row(Sampling(), seed, 9) for seed in range(8)]
    tokens = choose(torch.zeros(8, 5000), rows).tolist()
    assert tokens == sample(torch.zeros(8, 5000), rows)
    assert len({token // 1024 for token in tokens}) > 2


def test_equal_logits_go_to_the_lowest_id() -> None:
    logits = torch.zeros(4, 4000)
    for row, ids in enumerate([(3, 4), (1023, 1024), (2047, 3999), (5, 2, 1500)]):
        logits[row, list(ids)] = 7.0
    assert choose(logits, [Row(GREEDY, 1, 1)] * 4).tolist() == [3, 1023, 2047, 2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about the very values
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=3, top_p=0.5), Sampling(min_p=0.5)])
def test_rows_without_a_finite_maximum_are_marked(sampling: Sampling) -> None:
    logits = torch.randn(6, 1500, generator=torch.Generator().manual_seed(5))
    logits[1, 1400], logits[2, 3], logits[4, 0] = math.nan, math.inf, -math.inf
    logits[3] = -math.inf
    rows = [Row(sampling, i, i) for i in range(6)]
    usable = [0, 4, 5]
    tokens = choose(logits, rows).tolist()
    assert [tokens[i] for i in (1, 2, 3)] == [-1, -1, -1]
    assert [tokens[i] for i in usable] == sample(logits[usable], [rows[i] for i in usable])


def limits(samplings: list[Sampling]) -> Limits:
    return Limits(
        temperature=torch.tensor([s.temperature for s in samplings], dtype=torch.float64),
        top_k=torch.tensor([s.top_k or 2**40 for s in samplings]),
        top_p=torch.tensor([s.top_p if s.top_p < 1 else math.inf for s in samplings], dtype=torch.float64),
        min_p=torch.tensor([s.min_p for s in samplings], dtype=torch.float64).log(),
    )


@given(st.integers(0, 2**32), st.lists(SAMPLINGS.filter(lambda s: s.temperature > 1e-4), min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_filters_keep_what_the_reference_keeps(seed: int, samplings: list[Sampling]) -> None:
    logits = torch.randn(len(samplings), 97, generator=torch.Generator().manual_seed(seed)).mul(8).round().div(4)
    logits[:, ::7] = -math.inf
    kept = keep(logits, limits(samplings), ranks=True)
    for row, sampling in enumerate(samplings):
        ids, scaled = candidates(logits[row], sampling)
        found = torch.nonzero(kept[row] > -math.inf).flatten()
        if found.tolist() != ids.tolist():  # only the last of a nucleus may hang on the rounding of a sum
            share = (
                scaled.exp().sum() / (logits[row].double().sub(logits[row].max()) / sampling.temperature).exp().sum()
            )
            assert abs(len(found) - len(ids)) == 1 and abs(share - sampling.top_p) < 1e-9
        assert torch.equal(kept[row, found], logits[row, found])
    if all(s.top_k == 0 and s.top_p == 1 for s in samplings):
        assert torch.equal(keep(logits, limits(samplings), ranks=False), kept)


def test_ties_at_the_end_of_what_is_kept() -> None:
    """Sums that are exact: a nucleus ends with the token that reaches it; equal logits are ranked by id."""
    samplings = [Sampling(top_p=0.25), Sampling(top_k=3), Sampling(top_k=4, top_p=0.5), Sampling(top_p=1e-9)]
    kept = keep(torch.zeros(4, 8), limits(samplings), ranks=True)
    assert [torch.nonzero(row > -math.inf).flatten().tolist() for row in kept] == [[0, 1], [0, 1, 2], [0, 1], [0]]


def test_min_p_alone_needs_no_ranking() -> None:
    logits = torch.randn(4, 97, generator=torch.Generator().manual_seed(8)).mul(8).round().div(4)
    samplings = [Sampling(min_p=p) for p in (0.0, 0.01, 0.5, 1.0)]
    for row, kept in enumerate(keep(logits, limits(samplings), ranks=False)):
        assert torch.nonzero(kept > -math.inf).flatten().tolist() == candidates(logits[row], samplings[row])[0].tolist()


AHEAD_OF_TIME = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shared.kernels.sampling import BAD, BLOCK, _contend, _decide

KERNELS = [
    (_contend, "*fp32 i32 *fp32 *fp64 *i64 *i64 *fp64 *i32 i32 constexpr", {9: BLOCK}),
    (_decide, "*fp64 *i32 *fp32 *i64 i32 i32 constexpr constexpr", {6: BAD, 7: 128}),
]
for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
    for kernel, types, constants in KERNELS:
        signature = dict(zip(kernel.arg_names, types.split(), strict=True))
        source = ASTSource(kernel, signature, {(i,): value for i, value in constants.items()})
        built = triton.compile(source, target=target)
        print(target.arch, kernel.__name__, built.metadata.shared, "cubin" in built.asm or "hsaco" in built.asm)
"""


def test_the_kernels_compile_without_a_gpu() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", AHEAD_OF_TIME]
    out = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=100)
    assert out.returncode == 0, out.stderr[-2000:]
    assert len(out.stdout.splitlines()) == 6 and "False" not in out.stdout
