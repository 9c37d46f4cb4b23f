"""Filters and the sampling rule, against plain-Python references."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import accumulate

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from shared.errors import TrineError
from shared.messages import Sampling
from shared.sampling.filters import candidates
from shared.sampling.noise import gumbel, gumbel_rows
from shared.sampling.params import is_greedy, seed_of
from shared.sampling.sampler import BadLogits, Row, sample

GREEDY = Sampling(temperature=0.0)
# Multiples of 1/4 make ties common and keep sums exact enough for the reference below.
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=40)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.1, 0.5, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 40, 2**31 - 1]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-300, 0.05, 0.5, 1.0]),
)


def kept_by_reference(logits: list[float], s: Sampling) -> set[int]:
    ranking = sorted((i for i in range(len(logits)) if logits[i] > -math.inf), key=lambda i: (-logits[i], i))
    weight = {i: math.exp((logits[i] - logits[ranking[0]]) / s.temperature) for i in ranking}
    if s.top_k:
        ranking = ranking[: s.top_k]
    if s.top_p < 1:
        total, mass, length = math.fsum(weight[i] for i in ranking), 0.0, 0
        while length < len(ranking) and mass < s.top_p * total:
            mass += weight[ranking[length]]
            length += 1
        ranking = ranking[:length]
    return {i for i in ranking if s.min_p == 0 or weight[i] >= s.min_p * weight[ranking[0]] * (1 - 1e-12)}


def rounding_decides(logits: list[float], s: Sampling) -> bool:
    """Whether the likeliest have so nearly `top_p` of the probability that the sum may come out on either side."""
    weights = sorted((math.exp((x - max(logits)) / s.temperature) for x in logits), reverse=True)[: s.top_k or None]
    aim = s.top_p * math.fsum(weights)
    return s.top_p < 1 and any(abs(mass - aim) < 1e-12 * aim for mass in accumulate(weights))


@given(LOGITS, SAMPLINGS)
@example([-8.75, 9.25, 9.25], Sampling(temperature=0.5, top_p=0.6))
@settings(max_examples=400, deadline=None)
def test_filters_keep_what_the_reference_keeps(logits: list[float], sampling: Sampling) -> None:
    assume(not rounding_decides(logits, sampling))
    ids, scaled = candidates(torch.tensor(logits), sampling)
    assert ids.tolist() == sorted(kept_by_reference(logits, sampling))
    assert ids.numel() >= 1 and scaled.max() == 0
    assert scaled.tolist() == pytest.approx([(logits[i] - max(logits)) / sampling.temperature for i in ids.tolist()])


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("kw", [{"top_p": 0.9}, {"top_p": 0.9999}, {"top_k": 5000, "top_p": 0.5}, {"top_k": 300}])
def test_filters_on_a_real_vocabulary(spread: float, kw: dict[str, float]) -> None:
    """Wide and flat distributions, where the nucleus is not among the first few hundred tokens; all tied at 0."""
    logits = (torch.randn(49152, generator=torch.Generator().manual_seed(1)) * spread).mul(4).round().div(4)
    sampling = Sampling(**kw)  # type: ignore[arg-type]
    ids, _ = candidates(logits, sampling)
    expected = kept_by_reference(logits.tolist(), sampling)
    assert len(set(ids.tolist()) ^ expected) <= 1  # the last token may hang on the rounding of a sum


def test_tie_rules() -> None:
    flat = torch.zeros(10)
    assert candidates(flat, Sampling(top_k=3))[0].tolist() == [0, 1, 2]
    assert candidates(flat, Sampling(top_p=0.25))[0].tolist() == [0, 1, 2]
    assert candidates(flat, Sampling(min_p=1.0))[0].tolist() == list(range(10))
    assert sample(torch.tensor([[0.0, 7.0, 7.0, 7.0]]), [Row(GREEDY, 1, 1)]) == [1]


def test_each_filter_sees_what_the_one_before_kept() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert candidates(logits, Sampling(top_p=0.5))[0].tolist() == [0, 1]
    assert candidates(logits, Sampling(top_k=2, top_p=0.5))[0].tolist() == [0]  # 0.4 / 0.7 is over a half
    assert candidates(logits, Sampling(temperature=0.1, top_p=0.5))[0].tolist() == [0]  # temperature comes first
    assert candidates(logits, Sampling(temperature=100.0, min_p=0.9))[0].tolist() == [0, 1, 2, 3]


@given(st.integers(0, 2**32), st.integers(0, 9999), SAMPLINGS, st.floats(0.01, 12.0))
@settings(max_examples=150, deadline=None)
def test_a_token_is_the_argmax_of_kept_logits_plus_noise(
    seed: int, position: int, sampling: Sampling, spread: float
) -> None:
    """Leaving out tokens that cannot win, as the sampler does, changes nothing."""
    logits = torch.randn(700, generator=torch.Generator().manual_seed(seed)) * spread
    ids, scaled = candidates(logits, sampling)
    expected = ids[(scaled + gumbel_rows([seed], [position], 700)[0][ids]).argmax()].item()
    assert sample(logits[None], [Row(sampling, seed, position)]) == [expected]


@given(st.integers(0, 2**32), st.lists(st.one_of(st.just(GREEDY), SAMPLINGS), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_the_others(seed: int, samplings: list[Sampling]) -> None:
    logits = torch.randn(len(samplings), 300, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [Row(sampling, seed + i, i) for i, sampling in enumerate(samplings)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    assert together == sample(logits.flip(0), rows[::-1])[::-1]


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-9, 9.9e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=temperature, top_k=5, top_p=0.5)
    assert is_greedy(sampling)
    assert sample(logits, [Row(sampling, i, i) for i in range(20)]) == logits.argmax(-1).tolist()


def test_small_temperatures_above_it_give_the_greedy_text_too() -> None:
    logits = torch.arange(50.0).mul(0.1).expand(50, 50)
    assert sample(logits, [Row(Sampling(temperature=1e-4), i, i) for i in range(50)]) == [49] * 50


@pytest.mark.parametrize("temperature", [1e-5, 100.0, 1e308])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 3e37])
def test_extreme_values_stay_finite(temperature: float, scale: float) -> None:
    logits = torch.linspace(-1, 1, 100) * scale
    sampling = Sampling.model_construct(temperature=temperature, top_k=2**31 - 1, top_p=0.9, min_p=1e-300)
    ids, scaled = candidates(logits, sampling)
    assert scaled.isfinite().all() and ids.numel() >= 1
    assert 0 <= sample(logits[None], [Row(sampling, -(2**63), 2**40)])[0] < 100


def test_at_a_huge_temperature_every_token_is_drawn() -> None:
    sampling = Sampling.model_construct(temperature=1e308, top_k=0, top_p=1.0, min_p=0.0)
    drawn = sample(torch.tensor([0.0, 50.0, -50.0]).expand(200, 3), [Row(sampling, 0, i) for i in range(200)])
    assert set(drawn) == {0, 1, 2}


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((300, 50), -math.inf)
    logits[:, [3, 30]] = torch.tensor([0.0, 1.0])
    for sampling in (Sampling(temperature=100.0), Sampling(top_k=40), Sampling(top_p=0.9999), Sampling(min_p=1e-9)):
        assert set(sample(logits, [Row(sampling, 1, i) for i in range(300)])) == {3, 30}
    assert sample(logits[:1], [Row(GREEDY, 0, 0)]) == [30]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=2)])
def test_unusable_logits_name_their_rows(bad: float, sampling: Sampling) -> None:
    logits = torch.zeros(4, 10)
    logits[1, 7] = bad
    logits[3] = -math.inf
    with pytest.raises(BadLogits, match=r"\[1, 3\]") as caught:
        sample(logits, [Row(sampling, 0, 0)] * 4)
    assert caught.value.rows == (1, 3) and isinstance(caught.value, TrineError)
    assert len(sample(logits[[0, 2]], [Row(sampling, 0, 0)] * 2)) == 2


def test_shapes() -> None:
    assert sample(torch.zeros(0, 10), []) == []
    assert sample(torch.zeros(1, 1), [Row(Sampling(), 0, 0)]) == [0]
    with pytest.raises(ValueError, match="2 rows"):
        sample(torch.zeros(1, 10), [Row(GREEDY, 0, 0)] * 2)


def test_the_token_does_not_depend_on_noise_of_other_calls() -> None:
    """Asking about few tokens and about many gives one token the same noise, whatever path computes it."""
    wide = torch.zeros(5000)
    wide[100:] = -30.0
    narrow = wide.clone()
    narrow[100:] = -math.inf
    rows = [Row(Sampling(), 9, position) for position in range(50)]
    assert sample(wide.expand(50, -1), rows) == sample(narrow.expand(50, -1), rows)
    assert torch.equal(gumbel(9, 0, torch.arange(100)), gumbel(9, 0, torch.arange(5000))[:100])


def test_unset_seeds_fit_differ_and_repeat() -> None:
    seeds = {seed_of(seq, stamp, data) for seq in range(5) for stamp in range(5) for data in (b"a", b"b", b"1.a", b"")}
    assert len(seeds) == 100
    assert seed_of(3, 4, b"a") in seeds
    assert all(Sampling(seed=seed).seed == seed >= 0 for seed in seeds)


def test_text_and_params_import_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import shared.sampling.params, shared.sampling.stopping, shared.tokenizer\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ), cwd=os.getcwd())
