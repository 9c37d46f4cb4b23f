"""The drafter's recipe, from prompts to a model card, on a random target of a few thousand weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from shared.errors import ConfigError, ModelError
from tests import tiny_models
from training.drafter import acceptance, checkpoint, export, files, prompts, shards
from training.drafter.corpus import agreement, batch
from training.drafter.files import agree
from training.drafter.loss import distillation
from training.drafter.model import Drafter
from training.drafter.packing import Packed, plan
from training.drafter.recipe import Recipe
from training.drafter.settings import DataSettings, Folders, TrainSettings
from training.drafter.shards import Conversation
from training.drafter.target import Target
from training.drafter.train import Trainer, schedule
from training.drafter.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A Llama that reads bytes; its chats end turns with token 2, which also ends a text."""
    folder = tmp_path_factory.mktemp("target")
    size = {"vocab_size": 260, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    tiny_models.write(folder, {**tiny_models.ARCHITECTURES["llama"], **size})
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<|im_start|>", "<|im_end|>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT)
    return Target.of(folder, "tiny")


def recipe(target: Target, out: Path, **changes: Any) -> Recipe:
    data = DataSettings(target.fingerprint, shard=8, top_k=8, shortest=6, longest=12, context=600, slots=3)
    training = TrainSettings(
        target.fingerprint, shards=2, layers=(0, 2), vocabulary=100, epochs=2, batch_tokens=900, learning_rate=3e-3
    )
    folders = Folders(out, changes.pop("data", out / "data"))
    return Recipe(target, folders, data, replace(training, **changes), 2, lambda line: None, checkpoint_s=0.0)


@pytest.fixture(scope="module")
def done(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The whole recipe, never interrupted."""
    finished = recipe(target, tmp_path_factory.mktemp("done"))
    finished.run()
    return finished


def talks_of(done: Recipe, split: str = "train") -> list[Conversation]:
    return [talk for i in range(2) for talk in shards.read(done.folders.shard(split, i)).conversations()]


def test_recorded_distributions_are_the_targets(target: Target, done: Recipe) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(target.folder)
    asked = prompts.read(done.folders.prompts("train"), 16)
    assert any(len(p.turns) == 2 for p in asked)
    for prompt, talk in zip(asked, talks_of(done), strict=True):
        with torch.no_grad():
            logp = model(torch.from_numpy(talk.tokens).long()[None]).logits[0].log_softmax(-1)[talk.scored]
        torch.testing.assert_close(torch.from_numpy(talk.top_logp).float(), logp.topk(8).values, atol=2e-3, rtol=1e-3)
        answers = list(acceptance.turns(talk.scored, talk.scored))
        assert [len(a) <= most for a, most in zip(answers, prompt.max_tokens, strict=True)]
        taken = talk.tokens[talk.scored + 1]
        if prompt.temperature == 0:
            assert (taken == talk.top_ids[:, 0]).all()


def test_conversations_are_in_the_chat_format(target: Target, done: Recipe) -> None:
    tokenizer = Tokenizer.from_file(str(target.folder / "tokenizer.json"))
    asked = prompts.read(done.folders.prompts("train"), 16)
    assert any(p.system for p in asked)
    for prompt, talk in zip(asked, talks_of(done), strict=True):
        text = tokenizer.decode(talk.tokens.tolist(), skip_special_tokens=False)
        assert text.startswith(f"<|im_start|>system\n{prompt.system}<|im_end|>") == bool(prompt.system)
        for turn in prompt.turns:
            assert f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n" in text


def test_a_packed_row_gives_what_each_sequence_gives_alone(target: Target) -> None:
    vocabulary = Vocabulary(np.arange(0, 260, 2, dtype=np.int32), 260)
    drafter = Drafter.beginning(target, (0, 1), vocabulary)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, 260, n).astype(np.int32) for n in (5, 1, 17, 9)]
    with torch.no_grad():
        together = drafter(Packed.of(sequences, CPU), torch.arange(32))
        alone = [drafter(Packed.of([s], CPU), torch.arange(len(s))) for s in sequences]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_with_all_layers_and_tokens_it_is_the_target(target: Target) -> None:
    drafter = Drafter.beginning(target, (0, 1, 2), Vocabulary(np.arange(260, dtype=np.int32), 260))
    model: Any = AutoModelForCausalLM.from_pretrained(target.folder)
    tokens = np.random.default_rng(1).integers(3, 260, 40)
    with torch.no_grad():
        ours = drafter(Packed.of([tokens], CPU), torch.arange(40))
        theirs = model(torch.from_numpy(tokens)[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_layers_that_the_target_does_not_have_are_refused(target: Target) -> None:
    with pytest.raises(ConfigError, match="no layer 3, only 0 to 2") as refused:
        target.layers((0, 3))
    assert refused.value.field == "layers"


@pytest.mark.parametrize("architecture", ["qwen2", "llama3-rope"])
def test_targets_of_other_kinds_are_refused(architecture: str, tmp_path: Path) -> None:
    tiny_models.write(tmp_path, tiny_models.ARCHITECTURES[architecture])
    with pytest.raises(ModelError):
        Target.of(tmp_path, "other")


class Killed(Exception):
    """Stands for SIGKILL: nothing of the program runs after it, as far as files are concerned."""


def killed_after(count: int) -> Callable[..., None]:
    left = [count]

    def tick(*_: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    return tick


def everything_in(done: Recipe) -> dict[str, bytes]:
    names = [done.folders.checkpoint, *done.folders.data.iterdir(), done.folders.release / "model.safetensors"]
    return {path.name: path.read_bytes() for path in names if path.name != ".lock"}


def test_killed_again_and_again_it_makes_the_same_bytes(
    target: Target, done: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills, attempts = 0, 0
    for attempts in range(200):
        tick = killed_after(3 + attempts)
        with monkeypatch.context() as patched:
            step, sync, shard = Trainer._step, files._sync, shards.Shard.of
            patched.setattr(Trainer, "_step", lambda self, step=step, tick=tick: (step(self), tick())[0])
            patched.setattr(files, "_sync", lambda path, sync=sync, tick=tick: (tick(), sync(path)))
            patched.setattr(shards.Shard, "of", lambda talks, shard=shard, tick=tick: (tick(), shard(talks))[1])
            try:
                recipe(target, tmp_path).run()
                break
            except Killed:
                kills += 1
    assert kills > 5
    assert everything_in(recipe(target, tmp_path)) == everything_in(done)


def test_finished_stages_are_not_done_again(done: Recipe) -> None:
    before = {path: path.stat().st_mtime_ns for path in done.folders.out.rglob("*") if path.is_file()}
    again = replace(done, say=pytest.fail)
    again.run()
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_steps_follow_the_plan_and_the_schedule(done: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talks = talks_of(done)
    drafter = Drafter.beginning(done.target, (0, 2), Vocabulary(np.arange(90, dtype=np.int32), 260))
    trainer = Trainer(drafter, talks, talks, done.training, tmp_path / "checkpoint")
    seen: list[list[int]] = []
    rates: list[float] = []
    step = trainer._optimiser.step

    def built(some: list[Conversation], vocabulary: Vocabulary, device: torch.device) -> Any:
        seen.append([next(i for i, talk in enumerate(talks) if talk is one) for one in some])
        return batch(some, vocabulary, device)

    def stepped() -> None:
        rates.append(trainer._optimiser.param_groups[0]["lr"])
        step()

    monkeypatch.setattr("training.drafter.train.batch", built)
    monkeypatch.setattr(trainer._optimiser, "step", stepped)
    trainer.run(lambda line: None)
    assert seen == plan([len(t.tokens) for t in talks], 900, 2, 0)
    assert rates == [3e-3 * schedule(i, len(seen), done.training.warm_up) for i in range(len(seen))]


def test_training_learns(done: Recipe) -> None:
    history = checkpoint.progress_of(done.folders.checkpoint).history
    assert history[-1]["step"] == len(plan([len(t.tokens) for t in talks_of(done)], 900, 2, 0))
    talks = talks_of(done)
    vocabulary = checkpoint.vocabulary_of(done.folders.checkpoint, 260)
    losses = []
    drafter = Drafter.beginning(done.target, (0, 2), vocabulary)
    for _ in range(2):
        with torch.no_grad():
            packed, rows, thoughts = batch(talks, vocabulary, CPU)
            losses.append(float(distillation(drafter(packed, rows), thoughts, 0.3)))
        checkpoint.load_model(done.folders.checkpoint, drafter)
    assert losses[1] < losses[0]


def test_other_settings_are_refused_by_name(target: Target, done: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"made with epochs = 2, not 3") as refused:
        recipe(target, done.folders.out, epochs=3).run()
    assert refused.value.field == "epochs"
    agree(done.folders.out / "settings.json", done.training)


def test_a_release_is_the_trained_drafter_up_to_rounding(done: Recipe) -> None:
    trained = Drafter.beginning(done.target, (0, 2), checkpoint.vocabulary_of(done.folders.checkpoint, 260))
    checkpoint.load_model(done.folders.checkpoint, trained)
    released = export.read(done.folders.release, done.target)
    assert (released.vocabulary.target_ids == trained.vocabulary.target_ids).all()
    for (name, ours), theirs in zip(trained.named_parameters(), released.parameters(), strict=True):
        step = ours.abs().amax(-1, keepdim=True) / 127 if ours.dim() > 1 else 0.0
        assert ((ours - theirs).abs() <= step * 0.5001 + 1e-9).all(), name
    assert not any("embed" in name for name in released.state_dict())


def test_a_release_is_refused_by_another_target(done: Recipe) -> None:
    with pytest.raises(ModelError, match="the drafter is for tiny"):
        export.read(done.folders.release, replace(done.target, fingerprint="other"))


def test_the_report_and_the_card_say_what_was_found(done: Recipe) -> None:
    report = json.loads(done.folders.report.read_bytes())
    everything = report["acceptance"]["all"]
    assert set(everything["greedy"]["tokens_per_step"]) == {str(k) for k in range(1, 9)}
    assert report["bytes"] == export.size(done.folders.release) and report["relative_cost"] > 0
    drafter = export.read(done.folders.release, done.target)
    asked = prompts.read(done.folders.prompts("heldout"), 16)
    agreed = agreement(drafter, talks_of(done, "heldout"), 500, CPU)
    greedy = np.concatenate([a for a, p in zip(agreed, asked, strict=True) if p.temperature == 0])
    assert everything["greedy"]["agreement"] == pytest.approx(float(greedy.mean()))
    card = (done.folders.release / "MODEL_CARD.md").read_text()
    assert f"{everything['greedy']['agreement']:.1%}" in card and "license: apache-2.0" in card
