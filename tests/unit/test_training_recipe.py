"""The drafter's recipe: what its data are, and that it goes on where it was, on a tiny target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from shared.errors import ConfigError, ModelError
from tests import tiny_models
from tests.tiny_recipe import recipe, talks_of, write_target
from training.drafter import features, files, prompts, shards
from training.drafter.files import agree
from training.drafter.recipe import Recipe
from training.drafter.target import Target
from training.drafter.train import Trainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def done(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The whole recipe, never interrupted."""
    finished = recipe(target, tmp_path_factory.mktemp("done"))
    finished.run()
    return finished


def test_recorded_distributions_are_the_targets(target: Target, done: Recipe) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(target.folder)
    asked = prompts.read(done.folders.prompts("train"), 16)
    assert any(len(p.turns) == 2 for p in asked)
    for prompt, talk in zip(asked, talks_of(done), strict=True):
        with torch.no_grad():
            logp = model(torch.from_numpy(talk.tokens).long()[None]).logits[0].log_softmax(-1)[talk.scored]
        torch.testing.assert_close(torch.from_numpy(talk.top_logp).float(), logp.topk(8).values, atol=2e-3, rtol=1e-3)
        answers = np.split(talk.scored, np.flatnonzero(np.diff(talk.scored) != 1) + 1)
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


def test_hidden_states_are_what_the_lm_head_reads(target: Target, done: Recipe) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(target.folder)
    talks = shards.read(done.folders.shard("train", 1)).conversations()
    states = features.mapped(done.folders.hidden("train", 1), sum(len(talk.scored) for talk in talks), 32)
    at = 0
    for talk in talks:
        with torch.no_grad():
            logits = model(torch.from_numpy(talk.tokens).long()[None]).logits[0][talk.scored]
            ours = model.lm_head(torch.from_numpy(states[at : at + len(talk.scored)].astype(np.float32)))
        torch.testing.assert_close(ours, logits, atol=2e-3, rtol=2e-3)
        at += len(talk.scored)


def test_hidden_states_of_another_shard_are_refused(done: Recipe, tmp_path: Path) -> None:
    path = done.folders.hidden("train", 1)
    with pytest.raises(ConfigError, match="not F16"):
        features.mapped(path, 7, 32)
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-1])
    rows = len(shards.read(done.folders.shard("train", 1)).scored)
    for damaged in (tmp_path / "cut", tmp_path / "none", done.folders.prompts("train")):
        with pytest.raises(ConfigError, match="cannot be read"):
            features.mapped(damaged, rows, 32)


def test_a_target_without_the_sizes_is_refused(tmp_path: Path) -> None:
    tiny_models.write(tmp_path, tiny_models.ARCHITECTURES["gpt2"])
    with pytest.raises(ModelError, match="no usable hidden_size"):
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
    return {path.name: path.read_bytes() for path in names if not path.name.endswith(".lock")}


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


def test_other_settings_are_refused_by_name(target: Target, done: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"made with epochs = 3, not 4") as refused:
        recipe(target, done.folders.out, epochs=4).run()
    assert refused.value.field == "epochs"
    agree(done.folders.out / "settings.json", done.training)


def test_held_out_answers_are_as_many_as_the_report_says(done: Recipe) -> None:
    """Refused at once, before more are made."""
    before = sorted(path.name for path in done.folders.data.iterdir())
    with pytest.raises(ConfigError, match=r"report\.json was made with 16 held-out conversations, not 24") as refused:
        replace(done, heldout=3).run()
    assert refused.value.field == "heldout"
    assert sorted(path.name for path in done.folders.data.iterdir()) == before
    replace(done, heldout=1).run("train")
