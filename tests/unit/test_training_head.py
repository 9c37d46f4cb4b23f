"""Training, release and judgement of a draft head: the last stages of the recipe, on a tiny target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.engine.draft_head import DraftHead as Served
from shared.errors import ModelError
from shared.sampling.fields import Sampling
from shared.sampling.params import Row
from tests.tiny_recipe import recipe, talks_of, write_target
from training.drafter import checkpoint, export, features, prompts, shards
from training.drafter.chains import drafted
from training.drafter.corpus import Corpus
from training.drafter.model import DraftHead
from training.drafter.recipe import Recipe
from training.drafter.target import Target
from training.drafter.train import Trainer
from training.drafter.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def done(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The whole recipe, never interrupted."""
    finished = recipe(target, tmp_path_factory.mktemp("done"))
    finished.run()
    return finished


def corpus_of(done: Recipe, vocabulary: Vocabulary, split: str = "train") -> Corpus:
    parts = [shards.read(done.folders.shard(split, i)) for i in range(2)]
    hidden = [features.mapped(done.folders.hidden(split, i), len(part.scored), 32) for i, part in enumerate(parts)]
    return Corpus.of([talk for part in parts for talk in part.conversations()], hidden, vocabulary, 2, CPU)


def begun(done: Recipe, path: Path, **changes: Any) -> Trainer:
    settings = replace(done.training, **changes)
    vocabulary = checkpoint.vocabulary_of(done.folders.checkpoint, 260)
    corpus = corpus_of(done, vocabulary)
    head = DraftHead.beginning(done.target, vocabulary, np.ones(32, np.float32), settings)
    return Trainer(head, corpus, corpus, settings, path)


def test_every_epoch_begins_chains_everywhere_once(done: Recipe, tmp_path: Path) -> None:
    trainer = begun(done, tmp_path / "checkpoint")
    starts = trainer._corpus.starts.tolist()
    taken = [trainer._rows(step).tolist() for step in range(trainer.steps)]
    each = trainer.steps // 3
    epochs = [taken[i * each : (i + 1) * each] for i in range(3)]
    assert all(len(rows) == 60 for epoch in epochs for rows in epoch[:-1])
    assert all(sorted(row for rows in epoch for row in rows) == starts for epoch in epochs) and epochs[0] != epochs[1]
    assert begun(done, tmp_path / "checkpoint")._rows(each).tolist() == taken[each]


def test_a_later_draft_reads_the_guess_and_the_written_token(done: Recipe, tmp_path: Path) -> None:
    """The loss of chains of three, spelled out position by position."""
    trainer = begun(done, tmp_path / "checkpoint", least=0.0, unroll=(1.0, 0.5, 0.25), regression=0.0, hard=1.0)
    head, corpus = trainer._head, trainer._corpus
    rows = corpus.starts[10:40]
    total = 0.0
    for row in rows.tolist():
        state = corpus.states(np.array([row - 1]))
        for depth, weight in enumerate((1.0, 0.5, 0.25)):
            if depth > corpus.left[row]:
                break
            state = head(state, corpus.read(np.array([row + depth])))
            best = int(corpus.ids[row + depth, 0])
            if best >= 0:
                total -= weight * float(head.logits(state).log_softmax(1)[0, best].detach())
    assert float(trainer._loss(rows).detach()) == pytest.approx(total / len(rows), rel=1e-4)
    assert (corpus.left[rows] < 2).any()


def test_chains_that_a_drafter_would_not_follow_end(done: Recipe, tmp_path: Path) -> None:
    once = begun(done, tmp_path / "checkpoint", unroll=(1.0,))
    thrice, never = (begun(done, tmp_path / "checkpoint", least=least) for least in (0.0, 1.1))
    rows = once._corpus.starts[:50]
    losses = [float(trainer._loss(rows).detach()) for trainer in (once, never, thrice)]
    assert losses[0] == losses[1] < losses[2]


def test_a_frozen_head_stays_the_targets_and_is_taken_up_again(done: Recipe, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    begun(done, path, frozen_head=True, epochs=1).run(lambda line: None)
    again = begun(done, path, frozen_head=True)
    rows = done.target.head()[torch.from_numpy(again._head.vocabulary.target_ids).long()]
    assert torch.equal(again._head.head, rows) and again.progress.step == again.steps // 3
    before = again._head.state.detach().clone()
    again._step()
    assert torch.equal(again._head.head, rows) and not torch.equal(again._head.state, before)


def test_training_learns(done: Recipe, tmp_path: Path) -> None:
    before = begun(done, tmp_path / "checkpoint", least=0.0)
    after = begun(done, done.folders.checkpoint, least=0.0)
    rows = before._corpus.starts
    assert float(after._loss(rows).detach()) < 0.8 * float(before._loss(rows).detach())
    assert after.progress.step == after.steps == after.progress.history[-1]["step"]
    assert 0 <= after.progress.history[-1]["agreement_1"] <= 1


def trained(done: Recipe) -> DraftHead:
    vocabulary = checkpoint.vocabulary_of(done.folders.checkpoint, 260)
    head = DraftHead(done.target, vocabulary, 2, 24)
    checkpoint.load_model(done.folders.checkpoint, head)
    return head


def test_a_release_is_the_trained_head_up_to_rounding(done: Recipe) -> None:
    ours, theirs = trained(done), export.read(done.folders.release, done.target)
    assert (theirs.vocabulary.target_ids == ours.vocabulary.target_ids).all()
    released = theirs.tensors()
    for name, weight in ours.tensors().items():
        step = weight.abs().amax(-1, keepdim=True) / 127 if weight.dim() > 1 else 0.0
        assert ((weight - released[name]).abs() <= step * 0.5001 + 1e-9).all(), name


def test_chains_go_on_while_they_are_true_and_written(done: Recipe) -> None:
    head = trained(done)
    corpus = corpus_of(done, head.vocabulary)
    chains = drafted(head, corpus, 4)
    stray = 0
    for row, tried, true in zip(chains.rows.tolist(), chains.tried.tolist(), chains.true.tolist(), strict=True):
        state, right, count = corpus.states(np.array([row - 1])), 0, 0
        for at in range(row, min(row + 4, row + int(corpus.left[row]) + 1)):
            with torch.no_grad():
                state = head(state, corpus.read(np.array([at])))
                draft = int(head.logits(state).argmax())
            count += 1
            if draft != corpus.ids[at, 0]:
                break
            right += 1
            if draft != corpus.written[at]:
                stray += 1
                break
        assert (tried, true) == (count, right)
    assert stray and set(chains.true.tolist()) >= {0, 1, 2}


def test_the_engines_head_drafts_what_the_recipe_judged(done: Recipe) -> None:
    """The one that serves, on the files of a release, against the one that was trained."""
    reference, served = (
        export.read(done.folders.release, done.target),
        Served.load(done.folders.release, done.target.folder, threads=torch.get_num_threads()),
    )
    corpus = corpus_of(done, reference.vocabulary, "heldout")
    rows = corpus.starts[:40]
    state = corpus.states(rows - 1)
    served_state = served.start([part.half().numpy().tobytes() for part in state])
    windows = corpus.windows[rows].astype(np.int64)
    for _ in range(3):
        with torch.no_grad():
            state = reference(state, torch.from_numpy(windows))
            sure, drafts = reference.logits(state).softmax(1).max(1)
        greedy = [Row(Sampling(temperature=0.0), 0, 9)] * len(rows)
        tokens, confidence, served_state = served.step(served_state, windows.tolist(), greedy)
        assert tokens == reference.vocabulary.target_ids[drafts.numpy()].tolist()
        torch.testing.assert_close(torch.tensor(confidence), sure, atol=1e-3, rtol=1e-2)
        windows = np.concatenate([np.array(tokens)[:, None], windows[:, :1]], 1)


def test_a_release_is_refused_by_another_target(done: Recipe) -> None:
    with pytest.raises(ModelError, match="the draft head is for tiny"):
        export.read(done.folders.release, replace(done.target, fingerprint="other"))


def test_the_report_and_the_card_say_what_was_found(done: Recipe) -> None:
    report = json.loads(done.folders.report.read_bytes())
    everything = report["acceptance"]["all"]
    assert set(everything["tokens_per_step"]) == {str(k) for k in range(1, 9)}
    assert report["bytes"] == export.size(done.folders.release) and report["relative_cost"] > 0
    head = export.read(done.folders.release, done.target)
    corpus = corpus_of(done, head.vocabulary, "heldout")
    asked = prompts.read(done.folders.prompts("heldout"), 16)
    talks = talks_of(done, "heldout")
    of_row = np.repeat(np.arange(16), [len(talk.scored) for talk in talks])
    chains = drafted(head, corpus, 8)
    cold = chains.of(np.array([p.temperature == 0 for p in asked])[of_row[chains.rows]])
    assert everything["positions"] == len(cold.rows)
    assert everything["agreement"]["1"] == pytest.approx(float((cold.true >= 1).mean()))
    assert sum(entry["drafts"] for entry in report["calibration"]["first"]) == len(cold.rows)
    card = (done.folders.release / "MODEL_CARD.md").read_text()
    assert f"{everything['agreement']['1']:.1%}" in card and "license: apache-2.0" in card
