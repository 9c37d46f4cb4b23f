"""Parts of the drafter's recipe: prompts, rows, loss, acceptance, int8 and files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shared.engine.span import Span
from shared.errors import ConfigError
from training.drafter import acceptance, export, features, prompts
from training.drafter.chains import Chains
from training.drafter.corpus import Corpus
from training.drafter.files import put
from training.drafter.generate import Generator, looping
from training.drafter.loss import Thoughts, distillation, likelihood
from training.drafter.shards import Conversation
from training.drafter.train import schedule
from training.drafter.vocabulary import Vocabulary


def test_held_out_prompts_share_no_topic_with_others() -> None:
    train, heldout = prompts.draw("train", 600, 0, 64, 192), prompts.draw("heldout", 200, 0, 64, 192)
    topics = {topic for p in train for topic in p.topics}
    assert not topics & {topic for p in heldout for topic in p.topics}
    assert not {(p.template, p.topics) for p in train} & {(p.template, p.topics) for p in heldout}
    assert {p.kind for p in train} == {p.kind for p in heldout} == {k["name"] for k in prompts.material().kinds}
    for about, listed in prompts.material().topics.items():
        both = [prompts.material().of_split(about, split) for split in ("train", "heldout")]
        assert all(both) and sorted(both[0] + both[1]) == sorted(listed)


def test_prompts_are_the_same_for_a_seed_and_more_begin_with_the_same(tmp_path: Path) -> None:
    few, many = prompts.draw("train", 20, 1, 8, 9), prompts.draw("train", 60, 1, 8, 9)
    assert few == many[:20] and few != prompts.draw("train", 20, 2, 8, 9)
    assert len({p.turns[0] for p in many}) == 60
    assert not any("{topic}" in p.turns[0] or "{name}" in p.turns[0] for p in many)
    prompts.write(tmp_path / "p", few)
    assert prompts.read(tmp_path / "p", 12) == few[:12]
    with pytest.raises(ConfigError, match="has 20 prompts, not 21"):
        prompts.read(tmp_path / "p", 21)


def test_loops_end_an_answer() -> None:
    assert looping([9, *[1, 2, 3] * 16]) and looping([5] * 48)
    assert not looping([5] * 47) and not looping([*[1, 2, 3] * 15, 1, 2, 4]) and not looping(list(range(60)))


class ScriptedEngine:
    """Finds the token `last + 1` most likely; 2 ends a text."""

    info = SimpleNamespace(context_length=1000, block_size=16, eos_ids=frozenset({2}))

    def forward(self, spans: list[Span]) -> torch.Tensor:
        return torch.stack([torch.eye(100)[(span.token_ids[-1] + 1) % 100] * 9 for span in spans])


class ScriptedDialogue:
    """Turns are token ids; the end of an answer is written before each follow-up."""

    def opening(self, prompt: prompts.Prompt) -> list[int]:
        return [50, int(prompt.turns[0])]

    def follow_up(self, turn: str) -> list[int]:
        return [2, 60, int(turn)]


@pytest.mark.parametrize(
    ("first", "tokens", "scored"),
    [
        ("99", [50, 99, 0, 1, 2, 60, 70, 71, 72, 73], [1, 2, 3, 6, 7, 8]),  # the target ends its answer itself
        ("10", [50, 10, 11, 12, 13, 14, 2, 60, 70, 71, 72, 73], [1, 2, 3, 4, 8, 9, 10]),  # it is cut off
    ],
)
def test_a_second_turn_follows_the_end_of_the_first_answer(first: str, tokens: list[int], scored: list[int]) -> None:
    engine: Any = ScriptedEngine()
    prompt = prompts.Prompt("chat", "", (), "", (first, "70"), 0.0, (4, 3), 0)
    other = prompts.Prompt("chat", "", (), "", ("5",), 0.0, (90,), 0)
    shard = Generator(engine, ScriptedDialogue(), slots=1, top_k=3, context=40).shard([prompt, other], lambda *_: None)
    talk, longest = shard.conversations()
    assert talk.tokens.tolist() == tokens and talk.scored.tolist() == scored
    assert len(longest.tokens) == 40  # the context is full


def test_batches_by_length_waste_little() -> None:
    lengths = [int(n) for n in np.random.default_rng(2).integers(1, 90, 300)]
    groups = features.batches(lengths, 200)
    assert sorted(i for members in groups for i in members) == list(range(300))
    padded = [len(members) * max(lengths[i] for i in members) for members in groups]
    assert max(padded) <= 200 and sum(padded) < 1.1 * sum(lengths)
    assert features.batches([500, 3], 200) == [[0], [1]]  # a sequence longer than a batch is one


def test_rows_read_the_tokens_before_and_end_with_their_answer() -> None:
    vocabulary = Vocabulary(np.arange(10, 20, dtype=np.int32), 30)

    def talk(tokens: list[int], scored: list[int]) -> Conversation:
        rows = np.array(scored, int)
        top = np.array([[token, 29] for token in tokens], np.int32)[rows + 1]
        return Conversation(np.array(tokens, np.int32), rows, top, np.zeros((len(scored), 2), np.float16))

    talks = [talk([11, 12, 13, 14, 15, 16, 5, 18], [0, 1, 2, 5, 6]), talk([9, 9], []), talk([1, 11, 12], [1])]
    hidden = [np.arange(10, dtype=np.float16).reshape(5, 2), np.array([[98, 99]], np.float16)]
    corpus = Corpus.of(talks, hidden, vocabulary, 3, torch.device("cpu"))
    assert corpus.windows.tolist() == [
        [11, 30, 30], [12, 11, 30], [13, 12, 11], [16, 15, 14], [5, 16, 15], [11, 1, 30]
    ]  # fmt: skip
    assert corpus.written.tolist() == [2, 3, 4, -1, 8, 2] and corpus.ids[:, 1].tolist() == [-1] * 6
    assert corpus.left.tolist() == [2, 1, 0, 1, 0, 0] and corpus.starts.tolist() == [1, 2, 4]
    assert corpus.states(np.array([5, 0, 4])).tolist() == [[98, 99], [0, 1], [8, 9]]


def test_the_reduced_vocabulary_has_the_likeliest_tokens_and_maps_both_ways() -> None:
    ids = np.array([[7, 3], [7, 90], [41, 3]], np.int32)
    logp = np.log([[0.9, 0.1], [0.6, 0.2], [0.5, 0.2]]).astype(np.float16)
    talk = Conversation(np.zeros(4, np.int32), np.arange(3), ids, logp)
    vocabulary = Vocabulary.of([talk], 3, 100)
    assert vocabulary.target_ids.tolist() == [3, 7, 41]  # 0.3, 1.5 and 0.5; 90 has 0.2
    assert vocabulary.own(ids).tolist() == [[1, 0], [1, -1], [2, 0]]
    assert (vocabulary.target_ids[vocabulary.own(np.array([3, 41]))] == [3, 41]).all()
    assert Vocabulary.of([talk], 6, 100).target_ids.tolist() == [0, 1, 3, 7, 41, 90]
    with pytest.raises(ConfigError):
        Vocabulary(np.array([3, 3]), 100)


def naive_loss(logits: np.ndarray, target_p: np.ndarray, kept: list[int], known: dict[int, int], hard: float) -> float:
    """One position, spelled out. `target_p`: over the whole vocabulary; `known`: the head's ids of the target's."""
    q = np.exp(logits - logits.max())
    q /= q.sum()
    events = [(target_p[i], q[known[i]]) for i in kept if i in known]
    events.append((1 - sum(target_p[i] for i in kept), 1 - sum(q[known[i]] for i in kept if i in known)))
    left = sum(p for p, _ in events)
    divergence = sum(p / left * np.log((p / left) / r) for p, r in events if p > 0)
    cross_entropy = -np.log(q[known[kept[0]]]) if kept[0] in known else 0.0
    return float((1 - hard) * left * divergence + hard * cross_entropy)


def test_the_loss_is_that_of_a_naive_reference() -> None:
    rng = np.random.default_rng(3)
    proposable = np.sort(rng.choice(40, 25, replace=False)).astype(np.int32)
    vocabulary = Vocabulary(proposable, 40)
    known = {int(token): i for i, token in enumerate(proposable)}
    logits, p = rng.normal(size=(50, 25)) * 2, rng.dirichlet(np.full(40, 0.3), 50)
    kept = np.argsort(-p, 1)[:, :6]
    assert (vocabulary.own(kept) < 0).any() and (vocabulary.own(kept)[:, 0] < 0).any()
    thoughts = Thoughts(
        torch.from_numpy(vocabulary.own(kept)).long(), torch.from_numpy(np.log(np.take_along_axis(p, kept, 1))).float()
    )
    for hard in (0.0, 0.3, 1.0):
        expected = [naive_loss(*row, known, hard) for row in zip(logits, p, kept.tolist(), strict=True)]
        found = distillation(torch.from_numpy(logits).log_softmax(1), thoughts, hard)
        assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_loss_is_nil_and_level_where_the_head_is_the_target() -> None:
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    logits = p.log().requires_grad_()
    loss = distillation(logits.log_softmax(1), Thoughts(torch.tensor([[0, 1]]), p[:, :2].log()), 0.0)
    loss.backward()
    assert logits.grad is not None
    assert abs(loss.item()) < 1e-6 and logits.grad.abs().max() < 1e-6
    sure = Thoughts(torch.tensor([[0, 1]]), torch.tensor([[0.0, -80.0]]))
    certain = distillation(torch.tensor([[80.0, 0.0]]).log_softmax(1), sure, 0.5)
    assert certain.isfinite() and float(certain) < 1e-3


def test_likelihood_is_of_what_was_written() -> None:
    guessed = torch.tensor([[0.5, 0.5], [0.1, 0.9], [0.3, 0.7]]).log()
    torch.testing.assert_close(likelihood(guessed, torch.tensor([1, 0, -1])), torch.tensor([0.5, 0.1, 0.0]))


def test_steps_of_the_target() -> None:
    true = np.array([2, 1, 0, 1, 0, 0, 4, 3, 2, 1])
    assert [acceptance.steps(true, depth) for depth in (1, 2, 8)] == [6, 5, 4]
    assert acceptance.steps(np.zeros(3, int), 4) == 3 and acceptance.steps(np.arange(6, 0, -1), 4) == 2
    found = acceptance.tokens_per_step([np.array([3, 2, 1, 0]), np.array([0, 1])])
    assert found[1] == pytest.approx(6 / 4) and found[8] == pytest.approx(6 / 3)


def test_agreement_is_given_what_came_before_and_confidence_is_counted() -> None:
    confidence = np.array([[0.9, 0.2, 0.1], [0.3, 0, 0], [1.0, 0.6, 0]], np.float32)
    chains = Chains(np.arange(3), np.array([3, 1, 2]), np.array([2, 0, 2]), confidence)
    assert chains.agreement() == {1: pytest.approx(2 / 3), 2: 1.0, 3: 0.0}
    assert chains.of(np.array([False, True, False])).agreement() == {1: 0.0}
    assert chains.calibration([1], (0.0, 0.5, 1.0)) == [
        {"from": 0.0, "drafts": 1, "confidence": pytest.approx(0.3), "true": 0.0},
        {"from": 0.5, "drafts": 2, "confidence": pytest.approx(0.95), "true": 1.0},
    ]
    assert [entry["drafts"] for entry in chains.calibration([2, 3], (0.0, 0.5, 1.0))] == [2, 1]


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [schedule(step, 100, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[9:] == sorted(rates[9:], reverse=True) and 0.05 < rates[99] < 0.06


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    put(path, lambda part: part.write_text("old"))

    def half(part: Path) -> None:
        part.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        put(path, half)
    assert path.read_text() == "old"
    put(path, lambda part: part.write_text("new"))
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_int8_rows_are_off_by_half_a_step_at_most() -> None:
    weight = torch.randn(50, 70, generator=torch.Generator().manual_seed(4)) * torch.logspace(-6, 3, 50)[:, None]
    weight[7] = 0
    stored, scale = export.quantised(weight)
    error = (stored * scale[:, None] - weight).abs()
    assert stored.dtype == torch.int8 and (error <= scale[:, None] * 0.5001).all()
    torch.testing.assert_close(scale * 127, weight.abs().amax(1).clamp(min=1e-36))
