"""`trine check --drafter` as a user runs it, and its trial, on tiny models."""

from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import AddedToken, Tokenizer

from services.drafter.config import DrafterSettings
from shared.engine.base import StepEngine
from shared.engine.engine import Engine
from shared.engine.span import Span
from shared.errors import ConfigError, InvalidField, ModelError
from shared.tokenizer import Tokenizer as OurTokenizer
from tests import draft_release
from tests.ruined_model import write_ascii_tokenizer
from tests.tiny_models import ARCHITECTURES, VOCAB, write
from tests.unit.test_check import run
from trine import draft_trial
from trine.check_drafter import Report, check, measure, rendered
from trine.draft_tasks import TASKS
from trine.draft_trial import GREEDY, Trial
from trine.forecast import DEPTHS, Walk

TASK_NAMES = ["open chat", "summaries", "code edits", "lists"]


def model(folder: Path, *, seed: int = 0, context: int = 768, vocab: int = VOCAB) -> Path:
    """Reads ASCII, a token per character; all built-in prompts fit."""
    write(folder, {**ARCHITECTURES["llama"], "max_position_embeddings": context, "vocab_size": vocab}, seed)
    write_ascii_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("target"))


def tried_on(target: Path, drafter: Path | None = None, **more: Any) -> Report:
    """In this process, which has torch already; `more`: settings."""
    return measure(DrafterSettings(model=str(target), drafter_model=str(drafter or ""), threads=1, **more))


@pytest.mark.slow
def test_a_drafter_that_is_the_target_is_always_right(target: Path) -> None:
    done = run("--model", str(target), "--drafter", str(target), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") == 1
    report = json.loads(done.stdout)
    assert set(report) == {
        "model", "drafter", "fits", "refusals", "notes", "vocabulary", "target_context", "drafter_context", "worth",
    }  # fmt: skip
    assert (report["fits"], report["refusals"], report["notes"]) == (True, [], [])
    assert (report["target_context"], report["drafter_context"]) == (768, 768)
    assert report["drafter"] == str(target)
    assert (report["vocabulary"]["target_size"], report["vocabulary"]["different"]) == (VOCAB, 0)
    worth = report["worth"]
    assert set(worth["costs"]["verify"]) == {"1", "2", "3", "5", "9"}
    assert worth["costs"]["verify"]["1"] == 1.0
    assert worth["step_ms"] > 0
    assert [task["task"] for task in worth["tasks"]] == TASK_NAMES
    for task in worth["tasks"]:
        assert set(task["model"]["by_place"]) == {1.0}
        assert [at["k"] for at in task["model"]["depths"]] == list(DEPTHS)
        for at in task["model"]["depths"]:
            assert 0.8 * at["k"] < at["accepted"] <= at["k"], "but at the end of an answer"
    assert worth["verdict"] and worth["suffix_verdict"]
    assert "the target answers" in done.stderr


def test_its_own_first_layers_as_a_table(target: Path) -> None:
    report = tried_on(target, drafter_layers=1, block_size=8, kv_codec="int4", kv_check="off", model_name="mine")
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(rendered(report))
    lines = console.export_text().splitlines()
    assert lines[0] == "its first 1 layers as the drafter of mine"
    rows = [line for line in lines if "×" in line and "pays" not in line and "(" not in line]
    assert [re.split("  +", row.strip())[:2] for row in rows] == [
        [task, source] for task in TASK_NAMES for source in ("model", "suffix")
    ]
    assert all(row.count("×") == len(DEPTHS) for row in rows), "one line each on a terminal of 80 columns"
    assert any(line.startswith("model: pays on") for line in lines)
    assert any(line.startswith("suffix alone: pays on") for line in lines)


def test_the_same_size_with_other_content_is_refused_before_weights_are_read(target: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "model.safetensors"):
        (other / name).write_bytes(b"no weights")
    spec = json.loads((target / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    vocab["[/b]"] = vocab.pop("a")
    (other / "tokenizer.json").write_text(json.dumps(spec))
    done = run("--model", str(target), "--drafter", str(other))
    assert done.returncode == 1
    assert "does not fit" in done.stdout
    assert f"({VOCAB} ids in the target's, {VOCAB} in the drafter's); ids that are other tokens: 1" in done.stdout
    assert "id 97 is 'a' in the target's and '[/b]' in the drafter's" in done.stdout
    assert "open chat" not in done.stdout


def test_a_bigger_vocabulary_and_a_shorter_context_are_told(target: Path, tmp_path: Path) -> None:
    drafter = model(tmp_path / "drafter", seed=1, context=200, vocab=VOCAB + 16)
    tokenizer = Tokenizer.from_file(str(drafter / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<tool>"), AddedToken("<end>")])
    tokenizer.save(str(drafter / "tokenizer.json"))
    report = tried_on(target, drafter)
    assert report.fits
    assert [note.split(":")[0] for note in report.notes] == [
        "ids that only the drafter has, none of which is ever accepted",
        "the drafter's weights are for 144 ids, the target's for 128",
        "the drafter's context is 200 positions, the target's 768",
    ]
    assert str(report.vocabulary.examples[0]) == "128 is not in the target's and '<tool>' in the drafter's"
    assert report.worth is not None
    found = {task.task: task.model for task in report.worth.tasks}
    assert all(at.accepted < 0.5 for forecast in found.values() for at in forecast.depths), "it is another model"
    assert found["summaries"].by_place == (), "too long for it: nothing is drafted"
    assert found["summaries"].best.speedup == pytest.approx(1.0)


def test_weights_for_fewer_ids_than_the_target_has_are_refused(target: Path, tmp_path: Path) -> None:
    drafter = model(tmp_path / "drafter", vocab=VOCAB - 8)
    report = tried_on(target, drafter)
    assert not report.fits
    assert report.refusals == ("the drafter's weights are for 120 ids, the target has 128",)
    assert report.worth is None


def test_a_target_too_short_for_the_tasks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="context of 64 positions is too short"):
        tried_on(model(tmp_path / "short", context=64), drafter_layers=1)


@pytest.fixture(scope="module")
def perfect(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, head = tmp_path_factory.mktemp("perfect"), tmp_path_factory.mktemp("head")
    draft_release.write_perfect(target, head, vocab=VOCAB, context=768)
    return target, head


def test_a_draft_head_is_tried_with_the_targets_hidden_states(perfect: tuple[Path, Path]) -> None:
    report = tried_on(*perfect)
    assert (report.fits, report.notes, report.drafter) == (True, (), str(perfect[1]))
    assert (report.target_context, report.drafter_context) == (768, None)
    assert report.worth is not None
    assert 0 < report.worth.costs.draft < 2
    found = {task.task: task.model for task in report.worth.tasks}
    assert list(found) == TASK_NAMES
    for forecast in found.values():
        assert forecast.by_place and set(forecast.by_place) == {1.0}
        assert [at.k for at in forecast.depths if at.accepted > 0.8 * at.k][:3] == [1, 2, 4]
    assert found["lists"].depths[-1].accepted > 6, "by then it has learnt that all it says comes true"


def test_a_draft_head_of_another_target_does_not_fit(target: Path, perfect: tuple[Path, Path]) -> None:
    report = tried_on(target, perfect[1])
    assert not report.fits and report.worth is None
    assert "is for tiny, whose fingerprint is" in report.refusals[0]
    with pytest.raises(ConfigError, match="comes with Trine"):
        tried_on(target, Path("shipped"))


def test_what_makes_no_sense_is_one_clear_error(target: Path) -> None:
    with pytest.raises(InvalidField, match="name one") as caught:
        check(str(target), 2, {})
    assert caught.value.field == "drafter"
    with pytest.raises(ConfigError, match="TRINE_DRAFTER_LAYERS"):
        check("", 0, {})
    with pytest.raises(ModelError, match="4 layers asked for; the model has 3"):
        tried_on(target, drafter_layers=4)
    with pytest.raises(ModelError, match="no folder or GGUF file '/no/such'"):
        tried_on(target, Path("/no/such"))
    done = run("--model", str(target), "--drafter-layers", "1", "--text", "some.txt")
    assert (done.returncode, done.stdout) == (1, "")
    assert "--text is for KV codecs" in done.stderr


@pytest.fixture(scope="module")
def engines(target: Path) -> tuple[StepEngine, StepEngine]:
    def load(layers: int | None) -> Engine:
        return Engine.load(target, block_size=16, kv_blocks=400, layers=layers, threads=1)

    return load(None), load(2)


@pytest.fixture(scope="module")
def tried(target: Path, engines: tuple[StepEngine, StepEngine]) -> list[Trial]:
    ours, drafter = engines
    trials = draft_trial.trials(OurTokenizer.load(target), 16)
    draft_trial.answer(ours, trials, lambda done: None)
    for trial in trials:
        draft_trial.guess(drafter, trial)
    return trials


def alone(engine: StepEngine, tokens: tuple[int, ...], count: int) -> list[int]:
    """Greedy, from scratch at every token."""
    out: list[int] = []
    table = tuple(range(-(-(len(tokens) + count) // 16)))
    for _ in range(count):
        read = (*tokens, *out)
        out += engine.step([Span(read, 0, table, 1, sampling=GREEDY)])[0]
    return out


def test_answers_are_the_targets_own(engines: tuple[StepEngine, StepEngine], tried: list[Trial]) -> None:
    assert [trial.task for trial in tried[::3]] == TASK_NAMES == list(TASKS)
    tables = [block for trial in tried for block in trial.table]
    assert len(set(tables)) == len(tables)
    for trial in (tried[0], tried[-1]):
        assert trial.answer[:6] == alone(engines[0], trial.prompt, 6)
        ended = trial.answer[-1] in engines[0].info.eos_ids
        assert ended or len(trial.answer) == draft_trial.TOKENS


def test_guesses_accepted_are_what_drafting_step_by_step_gives(
    engines: tuple[StepEngine, StepEngine], tried: list[Trial]
) -> None:
    """One pass over the target's text tells as much as drafts of the drafter's own, one after the other."""
    drafter, depth, drafts_right = engines[1], 2, 0
    for trial in (tried[0], tried[9]):
        assert len(trial.guesses) == len(trial.answer)
        answer, at, steps = trial.answer[:24], 1, []
        while at < len(answer):
            drafts = alone(drafter, (*trial.prompt, *answer[:at]), min(depth, len(answer) - at - 1))
            right = next((i for i, (a, b) in enumerate(zip(drafts, answer[at:], strict=False)) if a != b), len(drafts))
            steps.append((len(drafts), right))
            at += right + 1
        assert Walk.of(answer, draft_trial.by_model(trial), depth).steps == tuple(steps)
        drafts_right += sum(right for _, right in steps)
    assert drafts_right, "or the comparison shows nothing"


def test_the_suffix_source_reads_prompt_and_answer() -> None:
    trial = Trial("any", (1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3), (), 0, answer=[4, 5, 6, 7, 20, 21, 4, 5])
    propose = draft_trial.by_suffix(trial)
    assert list(propose(1, 3)) == [5, 6, 7]
    assert list(propose(2, 2)) == [6, 7]
    assert not set(propose(5, 4)) & {4, 5}, "nothing that has not been said yet"


def test_costs_are_ratios(engines: tuple[StepEngine, StepEngine], tried: list[Trial]) -> None:
    costs, seconds = draft_trial.costs(engines[0], partial(draft_trial.model_step, engines[1]), tried)
    assert list(costs.verify) == [1, 2, 3, 5, 9]
    assert costs.verify[1] == 1.0
    assert 0 < costs.draft < 3
    assert 0 < seconds < 1
