"""Vocabularies compared id by id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.drafter.__main__ import build_model_source
from services.drafter.config import DrafterSettings
from shared.engine.fingerprint import vocabulary_digest
from shared.errors import ConfigError, ModelError
from shared.vocabulary import Comparison, Difference, Vocabulary
from tests.fake_engine import VOCAB, FakeEngine

WORDS = {"<s>": 0, "a": 1, "b": 2, "c": 3}
START = {"id": 0, "content": "<s>", "special": True}


def folder(path: Path, vocab: Any = WORDS, added: list[dict[str, Any]] | None = None) -> Path:
    path.mkdir()
    spec = {"model": {"vocab": vocab}, "added_tokens": [START] if added is None else added}
    (path / "tokenizer.json").write_text(json.dumps(spec))
    return path


def compared(path: Path, vocab: Any, added: list[dict[str, Any]] | None = None) -> Comparison:
    target = Vocabulary.load(folder(path / "target"))
    return Comparison.of(target, Vocabulary.load(folder(path / "drafter", vocab, added)))


def test_equal_ones_fit_however_they_are_written(tmp_path: Path) -> None:
    found = compared(tmp_path, [["<s>", 0.0], ["a", -1.0], ["b", -2.0], ["c", -3.0]])
    assert found == Comparison(4, 4, 0, 0, 0, 0, 0, ())
    assert found.refusal is None


def test_the_same_size_with_other_content_is_refused_with_an_example(tmp_path: Path) -> None:
    found = compared(tmp_path, {"<s>": 0, "a": 1, "c": 2, "b": 3})
    assert (found.target_size, found.drafter_size, found.different) == (4, 4, 2)
    assert found.examples == (Difference(2, "b", "c"), Difference(3, "c", "b"))
    assert found.refusal is not None
    assert "ids that are other tokens: 2" in found.refusal
    assert "2 is 'b' in the target's and 'c' in the drafter's" in found.refusal


def test_a_smaller_one_is_refused(tmp_path: Path) -> None:
    found = compared(tmp_path, {"<s>": 0, "a": 1, "b": 2})
    assert (found.different, found.missing, found.extra) == (0, 1, 0)
    assert found.refusal is not None
    assert "3 is 'c' in the target's and not in the drafter's" in found.refusal


def test_a_bigger_one_fits_and_is_reported(tmp_path: Path) -> None:
    found = compared(tmp_path, WORDS, [START, {"id": 4, "content": "<tool>", "special": True}])
    assert (found.drafter_size, found.extra, found.refusal) == (5, 1, None)
    assert found.examples == (Difference(4, None, "<tool>"),)


def test_added_tokens_count_like_others(tmp_path: Path) -> None:
    """The file's own model may have as many, and the difference lie in what is added on top."""
    target = Vocabulary.load(folder(tmp_path / "target", added=[START, {"id": 4, "content": "<im>", "special": True}]))
    other = Vocabulary.load(folder(tmp_path / "other", added=[START, {"id": 4, "content": "<tool>", "special": True}]))
    assert Comparison.of(target, other).examples == (Difference(4, "<im>", "<tool>"),)
    assert Comparison.of(target, other).refusal


def test_the_same_token_special_in_one_alone_is_told(tmp_path: Path) -> None:
    plain = compared(tmp_path, WORDS, [{**START, "special": False}])
    assert (plain.special, plain.added, plain.refusal) == (1, 0, None)
    (tmp_path / "second").mkdir()
    own = compared(tmp_path / "second", WORDS, [])
    assert (own.special, own.added, own.refusal) == (1, 1, None)


def test_only_a_few_examples_of_many(tmp_path: Path) -> None:
    target, drafter = ({f"{word}{i}": i for i in range(1000)} for word in "ab")
    found = Comparison.of(
        Vocabulary.load(folder(tmp_path / "target", target)), Vocabulary.load(folder(tmp_path / "other", drafter, []))
    )
    assert found.different == 1000
    assert [d.token_id for d in found.examples] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("text", ["", "[]", '{"model": {}}', '{"model": {"vocab": 3}}', '{"model": {"vocab": [[]]}}'])
def test_a_file_that_is_none_is_a_model_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Vocabulary.load(tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        vocabulary_digest(tmp_path)


def test_a_drafter_says_why_it_does_not_start(tmp_path: Path) -> None:
    target, drafter = folder(tmp_path / "target"), folder(tmp_path / "other", {"<s>": 0, "a": 1, "c": 2, "b": 3})
    for name in ("config.json", "model.safetensors"):
        (drafter / name).touch()
    settings = DrafterSettings(model="target", drafter_model=str(drafter))
    with pytest.raises(ConfigError, match=r"cannot draft for target: .* 2 is 'b' in the target's and 'c'") as caught:
        build_model_source(settings, target, vocabulary_digest(target))
    assert caught.value.field == "drafter_model"


@pytest.mark.parametrize(("words", "fits"), [(VOCAB - 1, True), (VOCAB, False)])
def test_nor_with_weights_for_fewer_ids_than_the_target_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: int, fits: bool
) -> None:
    """Both tokenizers are the same; one of them has more words than the draft model's weights are for."""
    vocab = {"<s>": 0, **{f"w{i}": i for i in range(1, words + 1)}}
    target, drafter = folder(tmp_path / "target", vocab), folder(tmp_path / "other", vocab)
    for name in ("config.json", "model.safetensors"):
        (drafter / name).touch()
    monkeypatch.setattr("services.drafter.__main__.load_draft_engine", lambda *_: FakeEngine())
    settings = DrafterSettings(model="target", drafter_model=str(drafter))
    if fits:
        assert build_model_source(settings, target, vocabulary_digest(target)).name == "model"
        return
    with pytest.raises(ConfigError, match="its weights are for 1,000 ids, the target has 1,001") as caught:
        build_model_source(settings, target, vocabulary_digest(target))
    assert caught.value.field == "drafter_model"
