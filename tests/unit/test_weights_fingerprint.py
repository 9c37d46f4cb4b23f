"""Fingerprints: equal for what computes the same KV, different for everything else, and cheap the second time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shared.engine import digests
from shared.engine import fingerprint as module
from shared.engine.fingerprint import fingerprint, vocabulary_digest
from shared.errors import ModelError

CONFIG = {"model_type": "llama", "rope_parameters": {"rope_theta": 10000.0}, "transformers_version": "5.0"}
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, config: dict[str, Any] = CONFIG, *shards: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for i, tensors in enumerate(shards or (TENSORS,)):
        save_file(tensors, folder / f"model-{i}.safetensors")
    return folder


def test_the_same_model_stored_otherwise_is_the_same(tmp_path: Path) -> None:
    one = fingerprint(write(tmp_path / "one"))
    reordered = dict(reversed(list(CONFIG.items()))) | {"transformers_version": "6.1", "_name_or_path": "x"}
    assert fingerprint(write(tmp_path / "two", reordered)) == one
    assert fingerprint(write(tmp_path / "three", CONFIG, {"b": TENSORS["b"]}, {"a": TENSORS["a"]})) == one
    assert len(one) == 64


def test_whatever_changes_the_kv_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "m")
    bumped = TENSORS["a"].clone()
    bumped[1, 2] = 5.0000005
    seen = [
        fingerprint(folder),
        fingerprint(folder, dtype="bfloat16"),
        fingerprint(folder, layers=2),
        fingerprint(write(tmp_path / "rope", CONFIG | {"rope_parameters": {"rope_theta": 10001.0}})),
        fingerprint(write(tmp_path / "bit", CONFIG, TENSORS | {"a": bumped})),
        fingerprint(write(tmp_path / "name", CONFIG, {"a": TENSORS["a"], "c": TENSORS["b"]})),
        fingerprint(write(tmp_path / "shape", CONFIG, TENSORS | {"a": TENSORS["a"].view(3, 2)})),
        fingerprint(write(tmp_path / "type", CONFIG, TENSORS | {"a": TENSORS["a"].view(torch.int32)})),
    ]
    monkeypatch.setattr(module, "LAYOUT_VERSION", 99)
    seen.append(fingerprint(folder))
    assert len(set(seen)) == len(seen)


def test_weights_are_hashed_once_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    real = module.tensor_digests

    def counted(path: Path) -> list[str]:
        calls.append(path)
        return real(path)

    monkeypatch.setattr(module, "tensor_digests", counted)
    folder = write(tmp_path / "m")
    first = fingerprint(folder)
    assert fingerprint(folder) == first and len(calls) == 1
    write(folder, CONFIG, TENSORS | {"b": torch.zeros(5)})
    assert fingerprint(folder) != first and len(calls) == 2


@pytest.mark.parametrize("damage", [b"", b"not json", b"[]", b'{"key": 1, "value": 2}'])
def test_a_damaged_cache_is_ignored(tmp_path: Path, cache: Path, damage: bytes) -> None:
    folder = write(tmp_path / "m")
    expected = fingerprint(folder)
    for slot in (cache / "digests").iterdir():
        slot.write_bytes(damage)
    assert fingerprint(folder) == expected


def test_without_a_writable_cache_it_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "m")
    expected = fingerprint(folder)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRINE_CACHE_DIR", str(tmp_path / "file" / "x"))
    assert fingerprint(folder) == expected


def test_a_file_digest_is_that_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert digests.file_digest(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("damage", ["truncated", "header", "length", "empty", "offsets"])
def test_files_that_are_no_safetensors(tmp_path: Path, damage: str) -> None:
    folder = write(tmp_path / "m")
    path = folder / "model-0.safetensors"
    data = path.read_bytes()
    path.write_bytes(
        {
            "truncated": data[:-1],
            "header": data[:8] + b"x" + data[9:],
            "length": b"\xff" * 8 + data[8:],
            "empty": b"",
            "offsets": data.replace(b"data_offsets", b"data_offsetz"),
        }[damage]
    )
    with pytest.raises(ModelError, match=r"model-0\.safetensors"):
        fingerprint(folder)


def vocabulary(folder: Path, model: dict[str, Any], added: list[dict[str, Any]] | None = None, **other: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added, **other}))
    return vocabulary_digest(folder)


def test_a_vocabulary_is_which_token_has_which_id(tmp_path: Path) -> None:
    bpe = {"vocab": {"a": 0, "b": 1}, "merges": []}
    one = vocabulary(tmp_path / "one", bpe)
    assert vocabulary(tmp_path / "two", {"merges": [], "vocab": {"b": 1, "a": 0}}, [], version="2.0") == one
    assert vocabulary(tmp_path / "unigram", {"vocab": [["a", -1.0], ["b", -2.0]]}) == one
    others = [
        vocabulary(tmp_path / "swapped", {"vocab": {"a": 1, "b": 0}}),
        vocabulary(tmp_path / "bigger", {"vocab": {"a": 0, "b": 1, "c": 2}}),
        vocabulary(tmp_path / "added", bpe, [{"id": 2, "content": "c2"}]),
        vocabulary(tmp_path / "newline", {"vocab": {"a\n1": 0, "b": 1}}),
    ]
    assert len({one, *others}) == 5


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        vocabulary(tmp_path / "m", {"no": "vocab"})
