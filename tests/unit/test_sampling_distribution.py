"""Sampled tokens follow the target's distribution, with drafts and without; and the same tests catch biased rules.

All seeds are fixed, so a run either always passes or always fails. A rule passes when its chi-square p-value is above
1e-3 and a control is caught when its is below 1e-9: the gap leaves no room for luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from shared.messages import Sampling
from shared.sampling.adjustments import Adjustments
from shared.sampling.filters import candidates
from shared.sampling.noise import MASK32, STREAM, _to_gumbel, gumbel_rows, philox4x32
from shared.sampling.processing import adjusted
from shared.sampling.sampler import Row, sample

VOCAB = 12
DRAWS = 200_000
PASSES, CAUGHT = 1e-3, 1e-9
LOGITS = torch.tensor([2.0, 1.5, 1.5, 1.0, 0.4, 0.0, -0.3, -0.8, -1.0, -2.0, -2.5, -4.0])
DRAFT_LOGITS = LOGITS + torch.tensor([0.9, -0.9, 0.4, -0.6, 0.8, -0.5, 0.3, 0.7, -0.7, 0.5, 0.2, 0.9])
MIXES = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=2.5),
    Sampling(top_k=4),
    Sampling(top_p=0.8),
    Sampling(min_p=0.2),
    Sampling(temperature=1.4, top_k=9, top_p=0.9, min_p=0.05),
]


def noise(seed: int, positions: Tensor) -> Tensor:
    """The noise of many positions at once, [positions, VOCAB]; `test_the_fast_noise_is_the_noise` ties it to ours."""
    blocks = torch.arange(VOCAB // 4)
    counter = (blocks[None], (positions & MASK32)[:, None], (positions >> 32)[:, None], STREAM)
    words = [torch.as_tensor(word) for word in philox4x32(counter, (seed & MASK32, seed >> 32))]
    return _to_gumbel(torch.stack(words, dim=-1).flatten(1))


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    ids, scaled = candidates(logits, sampling)
    return torch.zeros(VOCAB, dtype=torch.float64).index_put((ids,), scaled.softmax(0))


def draw(logits: Tensor, sampling: Sampling, seed: int, positions: Tensor) -> Tensor:
    """What `sample` gives at these positions, computed for all at once."""
    ids, scaled = candidates(logits, sampling)
    return ids[(scaled + noise(seed, positions)[:, ids]).argmax(-1)]


def pvalue(tokens: Tensor, expected: Tensor) -> float:
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    possible = expected > 0
    if counts[~possible].sum() > 0:
        return 0.0
    wanted = expected[possible] * counts.sum()
    return float(stats.chisquare(counts[possible].numpy(), wanted.numpy()).pvalue)


def test_the_fast_noise_is_the_noise() -> None:
    positions = torch.tensor([0, 1, 77, 2**33 + 5])
    assert torch.equal(noise(5, positions), gumbel_rows([5] * 4, positions.tolist(), VOCAB))
    for sampling in MIXES:
        rows = [Row(sampling, 5, position) for position in range(100)]
        assert sample(LOGITS.expand(100, -1), rows) == draw(LOGITS, sampling, 5, torch.arange(100)).tolist()


@pytest.mark.parametrize("sampling", MIXES, ids=str)
def test_tokens_over_positions_follow_the_target(sampling: Sampling) -> None:
    tokens = draw(LOGITS, sampling, seed=2024, positions=torch.arange(DRAWS))
    assert pvalue(tokens, probabilities(LOGITS, sampling)) > PASSES


@pytest.mark.parametrize("sampling", MIXES[::3], ids=str)
def test_tokens_over_seeds_follow_the_target(sampling: Sampling) -> None:
    """One position, many consecutive seeds, through the sampler itself."""
    rows = [Row(sampling, seed, 17) for seed in range(3000)]
    tokens = torch.tensor(sample(LOGITS.expand(len(rows), -1), rows))
    assert pvalue(tokens, probabilities(LOGITS, sampling)) > PASSES


def drafts_distribution(sampling: Sampling) -> Tensor:
    """Wrong: the drafter's tokens taken without asking the target."""
    return draw(DRAFT_LOGITS, sampling, 3, torch.arange(DRAWS))


def reused_noise(sampling: Sampling) -> Tensor:
    """Wrong: the same noise at every position."""
    return draw(LOGITS, sampling, 3, torch.zeros(DRAWS, dtype=torch.int64))


def equality_acceptance(sampling: Sampling) -> Tensor:
    """Wrong: an independent draft is kept if it equals one sample of the target, else the target samples again."""
    positions = torch.arange(DRAWS)
    drafts, first = draw(DRAFT_LOGITS, sampling, 3, positions), draw(LOGITS, sampling, 4, positions)
    return torch.where(drafts == first, drafts, draw(LOGITS, sampling, 5, positions))


def ratio_test_on_shared_noise(sampling: Sampling) -> Tensor:
    """Wrong: rejection sampling by min(1, p/q) whose residual is drawn with the noise that made the draft."""
    positions = torch.arange(DRAWS)
    p, q = probabilities(LOGITS, sampling), probabilities(DRAFT_LOGITS, sampling)
    drafts = draw(DRAFT_LOGITS, sampling, 3, positions)
    uniform = torch.rand(DRAWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    residual = (p - q).clamp(min=0).log()
    redrawn = (residual + noise(3, positions)).argmax(-1)
    return torch.where(uniform < p[drafts] / q[drafts], drafts, redrawn)


def temperature_forgotten(sampling: Sampling) -> Tensor:
    """Wrong: noise added to unscaled logits."""
    return draw(LOGITS, sampling.model_copy(update={"temperature": 1.0}), 3, torch.arange(DRAWS))


@pytest.mark.parametrize(
    "wrong",
    [drafts_distribution, reused_noise, equality_acceptance, ratio_test_on_shared_noise, temperature_forgotten],
)
def test_biased_rules_are_caught(wrong: Callable[[Sampling], Tensor]) -> None:
    sampling = Sampling(temperature=0.7)  # sharper, so that wrong rules are further off
    assert pvalue(wrong(sampling), probabilities(LOGITS, sampling)) < CAUGHT


def test_unfiltered_tokens_are_caught() -> None:
    filtered = Sampling(top_p=0.8)
    assert pvalue(draw(LOGITS, Sampling(), 3, torch.arange(DRAWS)), probabilities(LOGITS, filtered)) < CAUGHT


def independence(first: Tensor, second: Tensor) -> float:
    table = np.zeros((VOCAB, VOCAB))
    np.add.at(table, (first.numpy(), second.numpy()), 1)
    frequent = probabilities(LOGITS, Sampling()).numpy() > 0.01
    return float(stats.chi2_contingency(table[frequent][:, frequent]).pvalue)


def test_tokens_of_neighbouring_positions_and_seeds_are_independent() -> None:
    positions = torch.arange(DRAWS)
    tokens = draw(LOGITS, Sampling(), 7, positions)
    for lag in (1, 2, 4):
        assert independence(tokens[:-lag], tokens[lag:]) > PASSES
    for seed in (8, 7 + 2**32):
        assert independence(tokens, draw(LOGITS, Sampling(), seed, positions)) > PASSES
    assert independence(tokens, draw(DRAFT_LOGITS, Sampling(), 7, positions)) < CAUGHT  # same noise: dependent


@pytest.mark.parametrize("sampling", MIXES, ids=str)
def test_shared_noise_gets_more_drafts_accepted(sampling: Sampling) -> None:
    """At least (1 - TV) / (1 + TV) of them (Daliri et al. 2024), and more than independent sampling would."""
    positions = torch.arange(DRAWS)
    p, q = probabilities(LOGITS, sampling), probabilities(DRAFT_LOGITS, sampling)
    distance = 0.5 * (p - q).abs().sum().item()
    target = draw(LOGITS, sampling, 11, positions)
    shared = (draw(DRAFT_LOGITS, sampling, 11, positions) == target).double().mean().item()
    independent = (draw(DRAFT_LOGITS, sampling, 12, positions) == target).double().mean().item()
    error = 4 / math.sqrt(DRAWS)
    assert independent == pytest.approx((p * q).sum().item(), abs=error)
    assert shared > (1 - distance) / (1 + distance) - error
    assert shared < 1 - distance + error  # no coupling can do better
    assert shared > independent + 0.1


def toy_model(weight: float) -> Callable[[tuple[int, ...]], Tensor]:
    """Logits that depend on the last three tokens; `weight` mixes in another model."""

    def logits(prefix: tuple[int, ...]) -> Tensor:
        key = hash((1, *prefix[-3:])) % 2**31
        mine = torch.randn(VOCAB, generator=torch.Generator().manual_seed(key))
        other = torch.randn(VOCAB, generator=torch.Generator().manual_seed(key + 1))
        return 2 * ((1 - weight) * mine + weight * other)

    return logits


def sequentially(sampling: Sampling, seed: int, length: int) -> list[int]:
    model, tokens = toy_model(0.0), [1, 2, 3]
    while len(tokens) < length:
        tokens += sample(model(tuple(tokens))[None], [Row(sampling, seed, len(tokens))])
    return tokens


def speculatively(sampling: Sampling, seed: int, length: int, drafter_weight: float, k: int) -> tuple[list[int], int]:
    """All k + 1 positions are sampled in one call, then drafts are kept up to the first that differs."""
    model, drafter, tokens, accepted = toy_model(0.0), toy_model(drafter_weight), [1, 2, 3], 0
    while len(tokens) < length:
        drafts: list[int] = []
        for _ in range(k):
            prefix = (*tokens, *drafts)
            drafts += sample(drafter(prefix)[None], [Row(sampling, seed, len(prefix))])
        logits = torch.stack([model((*tokens, *drafts[:i])) for i in range(k + 1)])
        chosen = sample(logits, [Row(sampling, seed, len(tokens) + i) for i in range(k + 1)])
        matched = next((i for i in range(k) if drafts[i] != chosen[i]), k)
        accepted += matched
        tokens += chosen[: matched + 1]
    return tokens[:length], accepted


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), *MIXES[::2]], ids=str)
@pytest.mark.parametrize("drafter_weight", [0.0, 0.2, 1.0])
def test_verifying_drafts_gives_the_sequential_text(sampling: Sampling, drafter_weight: float) -> None:
    plain = sequentially(sampling, seed=99, length=60)
    for k in (1, 4):
        text, accepted = speculatively(sampling, 99, 60, drafter_weight, k)
        assert text == plain
        assert drafter_weight > 0 or accepted >= (60 - 3) * k // (k + 1) - k  # the target's twin is always right


PAIRS = 600
PENALISED = Sampling(frequency_penalty=1.5, presence_penalty=1.0, repetition_penalty=1.3, logit_bias={3: -100, 9: 2.0})
NEXT_LOGITS = LOGITS.roll(1) + 0.2


def after(taken: list[int], drafts: list[int], seed: int = 0, *, blind: bool = False) -> Row:
    """How a token is chosen behind a prompt of one token, these and those. `blind`: wrong, drafts count for nothing."""
    adjustments = Adjustments.of(PENALISED, [1], taken, [])
    return Row(PENALISED, seed, 1 + len(taken) + len(drafts), adjustments, () if blind else tuple(drafts))


def pairs_by_speculation(*, blind: bool) -> Tensor:
    """Two tokens for each of many seeds, [PAIRS, 2]: the first verifies a draft, the second is drawn behind it."""
    drafts = sample(DRAFT_LOGITS.expand(PAIRS, -1), [Row(Sampling(), seed, 1) for seed in range(PAIRS)])
    rows = [row for s, draft in enumerate(drafts) for row in (after([], [], s), after([], [draft], s, blind=blind))]
    taken = torch.tensor(sample(torch.stack([LOGITS, NEXT_LOGITS]).repeat(PAIRS, 1), rows)).view(PAIRS, 2)
    wrong = [i for i, draft in enumerate(drafts) if draft != taken[i, 0]]
    assert PAIRS / 5 < len(wrong) < PAIRS * 4 / 5
    again = [after([int(taken[i, 0])], [], i) for i in wrong]
    taken[wrong, 1] = torch.tensor(sample(NEXT_LOGITS.expand(len(wrong), -1), again))
    return taken


def pair_probabilities() -> Tensor:
    """[first, second], from the definition."""
    first = probabilities(adjusted(LOGITS[None], [after([], [])])[0], Sampling())
    second = adjusted(NEXT_LOGITS.expand(VOCAB, -1), [after([t], []) for t in range(VOCAB)])
    return first[:, None] * torch.stack([probabilities(row, Sampling()) for row in second])


def test_penalised_tokens_follow_the_target_with_drafts() -> None:
    """Counted are second tokens, apart for those that repeat the first: that is where penalties show."""
    expected, repeats = pair_probabilities(), torch.eye(VOCAB, dtype=torch.bool)
    cells = torch.cat([(expected * ~repeats).sum(0), (expected * repeats).sum(0)]) * PAIRS
    frequent = cells > 5

    def fit(pairs: Tensor) -> float:
        counts = torch.bincount(pairs[:, 1] + VOCAB * (pairs[:, 0] == pairs[:, 1]), minlength=2 * VOCAB)
        observed, wanted = [torch.cat([n[frequent], n[~frequent].sum()[None]]).numpy() for n in (counts, cells)]
        return float(stats.chisquare(observed, wanted).pvalue)

    assert fit(pairs_by_speculation(blind=False)) > PASSES
    assert fit(pairs_by_speculation(blind=True)) < CAUGHT
