"""Releases of draft heads that are not what they should be, and how settings name one."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.drafter.__main__ import build_source
from services.drafter.config import DrafterSettings
from shared import drafters
from shared.engine import draft_release
from shared.engine.draft_head import DraftHead
from shared.errors import ConfigError, ModelError
from shared.messages import Sampling
from shared.sampling.params import Row
from tests import draft_release as made

HIDDEN, WINDOW, WIDTH, VOCAB, PROPOSABLE = 32, 3, 40, 700, 400


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_target(tmp_path_factory.mktemp("target"), vocab=VOCAB)


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    generator, ids = torch.Generator().manual_seed(5), torch.arange(PROPOSABLE)
    return made.random_tensors(hidden=HIDDEN, window=WINDOW, width=WIDTH, ids=ids, generator=generator)


@pytest.fixture(scope="module")
def release(target: Path, tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("release"), target, tensors)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "llama"), ("format", 2), ("format", "1"), ("target", None), ("target.fingerprint", 7),
        ("target.vocabulary", None), ("hidden_size", 0), ("hidden_size", 1 << 20), ("hidden_size", 32.0), ("window", 0),
        ("window", 10**9), ("width", -1), ("width", 10**12), ("proposable", 0), ("proposable", 10**18),
        ("vocab_size", 10**10), ("vocab_size", True), ("rms_norm_eps", 0.0), ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", None),
    ],
)  # fmt: skip
def test_a_configuration_that_is_wrong_is_named(
    release: Path, target: Path, tmp_path: Path, field: str, value: object
) -> None:
    config: dict[str, Any] = json.loads((release / "config.json").read_text())
    first, _, second = field.partition(".")
    if second:
        config[first][second] = value
    else:
        config[first] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        DraftHead.load(tmp_path, target)
    assert caught.value.field == field


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors: {**tensors, name: tensor}


CHANGES: dict[str, tuple[str, Change]] = {
    "missing": ("up.weight", lambda tensors: {n: t for n, t in tensors.items() if n != "up.weight"}),
    "no scale": ("up.weight.scale", lambda tensors: {n: t for n, t in tensors.items() if n != "up.weight.scale"}),
    "one too many": ("bias", put("bias", torch.zeros(3))),
    "another norm": ("norms.4.weight", put("norms.4.weight", torch.ones(HIDDEN))),
    "float matrix": ("down.weight", put("down.weight", torch.zeros(HIDDEN, WIDTH))),
    "half norm": ("out.weight", put("out.weight", torch.ones(HIDDEN).half())),
    "turned": ("down.weight", put("down.weight", torch.zeros(WIDTH, HIDDEN, dtype=torch.int8))),
    "flat": ("out.weight", put("out.weight", torch.ones(1, HIDDEN))),
    "long ids": ("vocabulary", put("vocabulary", torch.arange(PROPOSABLE))),
    "id too large": ("vocabulary", put("vocabulary", torch.arange(VOCAB - PROPOSABLE + 1, VOCAB + 1).int())),
    "negative id": ("vocabulary", put("vocabulary", torch.arange(-1, PROPOSABLE - 1).int())),
    "id twice": ("vocabulary", put("vocabulary", torch.zeros(PROPOSABLE, dtype=torch.int32))),
    "not a number": ("norms.1.weight", put("norms.1.weight", torch.full((HIDDEN,), torch.nan))),
    "infinite": ("head.weight.scale", put("head.weight.scale", torch.full((PROPOSABLE,), torch.inf))),
    "huge scale": ("head.weight.scale", put("head.weight.scale", torch.full((PROPOSABLE,), 1e6))),
    "no size": ("gate.weight.scale", put("gate.weight.scale", torch.zeros(WIDTH))),
    "negative scale": ("skip.weight.scale", put("skip.weight.scale", torch.full((HIDDEN,), -0.01))),
    "huge norm": ("norms.0.weight", put("norms.0.weight", torch.full((HIDDEN,), 3e38))),
    "hugely negative": ("out.weight", put("out.weight", torch.full((HIDDEN,), -1e30))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_is_wrong_is_named(
    tensors: dict[str, Tensor], release: Path, target: Path, tmp_path: Path, change: str
) -> None:
    name, changed = CHANGES[change]
    (tmp_path / "config.json").write_bytes((release / "config.json").read_bytes())
    save_file(changed(tensors), tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        DraftHead.load(tmp_path, target)
    assert caught.value.field == name


def test_rows_of_zeros_are_fine(tensors: dict[str, Tensor], target: Path, tmp_path: Path) -> None:
    """With the scale that the recipe gives them."""
    tiny = torch.finfo(torch.float32).tiny
    zeros = {
        "up.weight": torch.zeros(WIDTH, 4 * HIDDEN, dtype=torch.int8),
        "up.weight.scale": torch.full((WIDTH,), tiny),
    }
    head = DraftHead.load(made.write(tmp_path, target, {**tensors, **zeros}), target)
    [token], _, _ = head.step(head.start([bytes(2 * HIDDEN)]), [(1,)], [Row(Sampling(temperature=0.0), 0, 1)])
    assert token in range(PROPOSABLE)


def test_a_head_that_gives_no_finite_numbers_is_refused_before_it_serves(
    tensors: dict[str, Tensor], target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passed all looks at single numbers may overflow still."""
    monkeypatch.setattr(draft_release, "LARGEST", torch.inf)
    made.write(tmp_path, target, {**tensors, "head.weight.scale": torch.full((PROPOSABLE,), 3e38)})
    with pytest.raises(ModelError, match="no finite numbers"):
        build_source(DrafterSettings(drafter_model=str(tmp_path), threads=1), target, "any")


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 64, struct.pack("<Q", 1 << 60) + b"{}"])
def test_a_file_that_is_none(release: Path, target: Path, tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "config.json").write_bytes((release / "config.json").read_bytes())
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="cannot be read"):
        DraftHead.load(tmp_path, target)


def test_sizes_are_compared_before_anything_is_read(release: Path, target: Path, tmp_path: Path) -> None:
    """What config.json announces would be terabytes."""
    config = json.loads((release / "config.json").read_text())
    config |= {"hidden_size": 32_768, "window": 64, "width": 65_536, "proposable": 1 << 22, "vocab_size": 1 << 22}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((release / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="not "):
        DraftHead.load(tmp_path, target)


@pytest.mark.parametrize("what", ["fingerprint", "vocabulary"])
def test_a_head_for_another_target_is_refused(release: Path, target: Path, tmp_path: Path, what: str) -> None:
    config = json.loads((release / "config.json").read_text())
    config["target"][what] = "0" * 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"is for tiny, whose {what} is 000000000000, not") as caught:
        DraftHead.load(tmp_path, target)
    assert caught.value.field == "drafter_model"


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(
    tensors: dict[str, Tensor], target: Path, tmp_path: Path
) -> None:
    """A head reads whatever the tokenizer gives."""
    few = {**tensors, "vocabulary": torch.arange(100).int(), "head.weight": tensors["head.weight"][:100]}
    few["head.weight.scale"] = tensors["head.weight.scale"][:100]
    DraftHead.load(made.write(tmp_path / "enough", target, few, vocab_size=128), target)
    made.write(tmp_path / "less", target, few, vocab_size=127)
    with pytest.raises(ModelError, match=r"vocab_size: 127 ids, but the tokenizer of .* has 128") as caught:
        DraftHead.load(tmp_path / "less", target)
    assert caught.value.field == "vocab_size"


@pytest.mark.parametrize(
    ("table", "field"),
    [
        (torch.zeros(VOCAB - 1, HIDDEN), "vocab_size"),
        (torch.zeros(VOCAB, HIDDEN - 1), "hidden_size"),
        (torch.zeros(VOCAB * HIDDEN), "hidden_size"),
        (torch.zeros(VOCAB, HIDDEN, dtype=torch.int8), "vocab_size"),
    ],
)
def test_embeddings_that_do_not_fit(release: Path, tmp_path: Path, table: Tensor, field: str) -> None:
    save_file({"model.embed_tokens.weight": table}, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"a draft head's target has \(700, 32\)") as caught:
        draft_release.embedding(tmp_path, draft_release.about(release))
    assert caught.value.field == field


def test_embeddings_are_looked_for(release: Path, target: Path, tmp_path: Path) -> None:
    about = draft_release.about(release)
    save_file({"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"no embed_tokens\.weight"):
        draft_release.embedding(tmp_path, about)
    assert draft_release.embedding(target, about).shape == (VOCAB, HIDDEN)


# Names


def test_what_a_name_means(release: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert drafters.find(str(release), target) == release.resolve()
    assert not drafters.needs_weights(str(release))
    assert drafters.find(str(target), target) is None
    assert drafters.needs_weights(str(target)) and drafters.needs_weights("some/model")
    monkeypatch.setattr(drafters, "HOME", tmp_path)
    assert drafters.find("", target) is None
    with pytest.raises(ConfigError, match="comes with Trine") as caught:
        drafters.find("shipped", target)
    assert caught.value.field == "drafter_model"
    for name, fingerprint in (("another", "0" * 64), ("ours", None)):
        config = json.loads((release / "config.json").read_text())
        config["target"]["fingerprint"] = fingerprint or config["target"]["fingerprint"]
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert drafters.find("", target) == drafters.find("shipped", target) == tmp_path / "ours"
    (tmp_path / "ours" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"target\.fingerprint is missing"):
        drafters.find("", target)


def test_a_drafter_takes_the_head_that_is_named_or_comes_with_trine(
    release: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(source: Literal["auto", "model", "suffix"], name: str) -> str | None:
        found = build_source(DrafterSettings(draft_source=source, drafter_model=name, threads=1), target, "any")
        return found.name if found else None

    monkeypatch.setattr(drafters, "HOME", tmp_path)
    assert (built("auto", ""), built("auto", str(release)), built("suffix", str(release))) == (None, "head", None)
    (tmp_path / "ours").symlink_to(release)
    assert (built("auto", ""), built("model", ""), built("auto", "shipped")) == ("head", "head", "head")
    assert built("suffix", "") is None
