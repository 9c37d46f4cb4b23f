"""Bias, penalties and withheld EOS, against a naive sampler in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import Sampling
from shared.sampling.adjustments import Adjustments
from shared.sampling.among import sample_among
from shared.sampling.noise import gumbel_rows
from shared.sampling.params import is_greedy
from shared.sampling.processing import adjusted
from shared.sampling.sampler import BadLogits, Row, sample
from tests.unit.test_sampling import kept_by_reference

VOCAB = 30
EOS = (2, 7)
TOKENS = st.integers(0, VOCAB - 1)
PENALTIES = st.sampled_from([-2.0, -0.5, 0.0, 0.0, 0.25, 1.0, 2.0])
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-9, 1e-4, 0.3, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 5, VOCAB, 9_999_999]),
    top_p=st.sampled_from([1e-9, 0.5, 0.9, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-300, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2, 0.5, 10.0, 1e-9]),
    frequency_penalty=PENALTIES,
    presence_penalty=PENALTIES,
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -99.0, -1.5, 0.0, 3.0, 100.0]), max_size=5),
    min_tokens=st.integers(0, 6),
)


@dataclass(frozen=True)
class Text:
    """What stands before a token: a prompt, then tokens that were taken, then drafts."""

    prompt: list[int]
    taken: list[int]
    drafts: list[int]

    def row(self, sampling: Sampling, seed: int = 0) -> Row:
        adjustments = Adjustments.of(sampling, self.prompt, self.taken, EOS)
        length = len(self.prompt) + len(self.taken) + len(self.drafts)
        return Row(sampling, seed, length, adjustments, tuple(self.drafts))


TEXTS = st.builds(Text, *(st.lists(TOKENS, max_size=8) for _ in range(3)))


def adjusted_by_reference(logits: list[float], s: Sampling, text: Text) -> list[float]:
    generated = Counter(text.taken + text.drafts)
    out = []
    for token, logit in enumerate(logits):
        bias = s.logit_bias.get(token, 0.0)
        value = -math.inf if bias == -100 else float(np.float32(logit + bias))
        if token in text.prompt or generated[token]:
            value = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
        value -= s.frequency_penalty * generated[token]
        value -= s.presence_penalty * (generated[token] > 0)
        if token in EOS and generated.total() < s.min_tokens:
            value = -math.inf
        out.append(float(np.float32(value)))
    return out


def token_by_reference(logits: list[float], s: Sampling, text: Text, seed: int) -> int | None:
    values = adjusted_by_reference(logits, s, text)
    if max(values) == -math.inf:
        return None
    if is_greedy(s):
        return values.index(max(values))
    position = len(text.prompt) + len(text.taken) + len(text.drafts)
    noise = gumbel_rows([seed], [position], VOCAB)[0].tolist()
    kept = sorted(kept_by_reference(values, s))
    return max(kept, key=lambda i: (values[i] - max(values)) / s.temperature + noise[i])


def drawn(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)).mul(8).round().div(4)


@given(st.integers(0, 2**32), st.lists(st.tuples(SAMPLINGS, TEXTS), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_logits_and_tokens_are_those_of_the_reference(seed: int, asked: list[tuple[Sampling, Text]]) -> None:
    """Rows of all kinds in one step, with masks of the model's own."""
    logits = drawn(seed, len(asked))
    logits[:, 11] = -math.inf
    before = logits.clone()
    rows = [text.row(sampling, seed) for sampling, text in asked]
    found = adjusted(logits, rows)
    expected = [adjusted_by_reference(row, *one) for row, one in zip(logits.tolist(), asked, strict=True)]
    assert found.tolist() == expected
    tokens = [token_by_reference(row, *one, seed) for row, one in zip(logits.tolist(), asked, strict=True)]
    impossible = tuple(i for i, token in enumerate(tokens) if token is None)
    if impossible:
        with pytest.raises(BadLogits) as caught:
            sample(logits, rows)
        assert caught.value.rows == impossible
    else:
        assert sample(logits, rows) == tokens
    assert torch.equal(logits, before)


@given(
    st.integers(0, 2**32), st.lists(st.tuples(SAMPLINGS, TEXTS), min_size=1, max_size=4), st.sets(TOKENS, min_size=1)
)
@settings(max_examples=150, deadline=None)
def test_a_part_of_the_vocabulary_is_adjusted_as_in_the_whole(
    seed: int, asked: list[tuple[Sampling, Text]], part: set[int]
) -> None:
    logits, ids = drawn(seed, len(asked)), np.array(sorted(part))
    rows = [text.row(sampling) for sampling, text in asked]
    found = adjusted(logits[:, ids], rows, ids)
    assert torch.equal(found, adjusted(logits, rows)[:, ids])


def test_a_part_costs_no_more_in_a_large_vocabulary() -> None:
    """A full row for such ids would be eight gigabytes."""
    far = (1 << 31) - 5
    sampling = Sampling(temperature=0.0, logit_bias={4: 3.0, far: 5.0, far + 1: 100.0}, presence_penalty=1.0)
    row = Row(sampling, 0, 3, Adjustments.of(sampling, [1], [far, far + 2], [far + 3]))
    logits = torch.tensor([[0.5, 0.0, -1.0]])
    ids = torch.tensor([3, 4, far])
    assert adjusted(logits, [row], ids.numpy()).tolist() == [[0.5, 3.0, 3.0]]
    assert sample_among(logits.repeat(2, 1), [row, Row(sampling, 0, 3)], ids)[0] == [4, 3]


@given(SAMPLINGS, TEXTS)
@settings(max_examples=100, deadline=None)
def test_drafts_leave_nothing_behind(sampling: Sampling, text: Text) -> None:
    adjustments = Adjustments(sampling, text.prompt, text.taken, EOS)
    before = [list(numbers) for numbers in adjustments.counts()]
    with_drafts = [list(numbers) for numbers in adjustments.counts(text.drafts)]
    assert [list(numbers) for numbers in adjustments.counts()] == before
    adjustments.take(text.drafts)
    if adjustments.penalises:
        assert [list(numbers) for numbers in adjustments.counts()] == with_drafts


def test_nothing_to_adjust_costs_nothing() -> None:
    logits = torch.zeros(2, VOCAB)
    rows = [Text([1], [2], [3]).row(Sampling(temperature=0.5, top_k=3, logit_bias={})) for _ in range(2)]
    assert [row.adjustments for row in rows] == [None, None]
    assert adjusted(logits, rows) is logits


def test_the_prompt_counts_for_repetition_only() -> None:
    text = Text([4], [5], [])
    logits = torch.ones(1, VOCAB)
    penalised = adjusted(logits, [text.row(Sampling(frequency_penalty=0.5, presence_penalty=0.25))])[0]
    assert penalised[[4, 5]].tolist() == [1.0, 0.25]
    penalised = adjusted(logits, [text.row(Sampling(repetition_penalty=2.0))])[0]
    assert penalised[[4, 5, 6]].tolist() == [0.5, 0.5, 1.0]


@pytest.mark.parametrize("generated", range(5))
def test_eos_is_withheld_for_exactly_so_many_tokens(generated: int) -> None:
    """Whether the tokens before were taken or are drafts."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 9.0
    sampling = Sampling(temperature=0.0, min_tokens=3)
    for taken in range(generated + 1):
        row = Text([1, 2], [4] * taken, [4] * (generated - taken)).row(sampling)
        assert sample(logits, [row]) == [7 if generated >= 3 else 0]


@pytest.mark.parametrize("penalty", [5e-324, 1e-30])
@pytest.mark.parametrize("scale", [1.0, 3e38])
def test_tiny_repetition_penalties_stay_finite(penalty: float, scale: float) -> None:
    logits = torch.linspace(-1, 1, VOCAB)[None] * scale
    for temperature in (0.0, 1.0):
        row = Text([VOCAB - 1, 0], [], []).row(Sampling(temperature=temperature, repetition_penalty=penalty))
        assert sample(logits, [row]) == [VOCAB - 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unusable_logits_stay_unusable(bad: float) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 5] = bad
    row = Text([5], [5], []).row(Sampling(temperature=0.0, repetition_penalty=1.5, frequency_penalty=2.0))
    with pytest.raises(BadLogits) as caught:
        sample(logits, [row, row])
    assert caught.value.rows == (1,)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_also_where_an_end_is_withheld(bad: float) -> None:
    """Log-probabilities are of the logits as they are: those of a row that is let through must be finite."""
    logits = torch.zeros(2, VOCAB)
    logits[1, 7] = bad
    row = Text([1], [], []).row(Sampling(temperature=0.0, min_tokens=3))
    assert row.adjustments is not None
    assert 7 in row.adjustments.held_off(row.position)
    with pytest.raises(BadLogits) as caught:
        sample(logits, [row, row])
    assert caught.value.rows == (1,)


def test_a_row_without_candidates_is_the_only_one_to_fail() -> None:
    nothing = Sampling(logit_bias=dict.fromkeys(range(VOCAB), -100.0))
    rows = [Text([1], [], []).row(sampling) for sampling in (Sampling(temperature=0.0), nothing)]
    with pytest.raises(BadLogits) as caught:
        sample(drawn(1, 2), rows)
    assert caught.value.rows == (1,)
    assert sample(drawn(1, 2)[:1], rows[:1]) == [int(drawn(1, 2)[0].argmax())]


def test_a_greatest_bias_all_but_decides() -> None:
    row = Text([], [], []).row(Sampling(logit_bias={3: 100.0}))
    assert {sample(drawn(seed), [row])[0] for seed in range(50)} == {3}
