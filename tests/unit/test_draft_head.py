"""The draft head against plain float32, what it chooses, and releases that are not what they should be."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.drafter.__main__ import build_source
from services.drafter.config import DrafterSettings
from shared import drafters
from shared.engine import draft_head, draft_release, int8_linear
from shared.engine.base import BadSpans
from shared.engine.draft_head import DraftHead
from shared.errors import ConfigError, InvalidField, ModelError
from shared.messages import Sampling
from shared.sampling.adjustments import Adjustments
from shared.sampling.among import CONTENDERS
from shared.sampling.params import Row
from shared.sampling.sampler import sample
from tests import draft_release as made
from tests.ruined_model import write_ascii_tokenizer
from tests.tiny_models import ARCHITECTURES, write

HIDDEN, WINDOW, WIDTH, VOCAB, PROPOSABLE = 32, 3, 40, 700, 400
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write(folder, {**ARCHITECTURES["llama"], "vocab_size": VOCAB})
    write_ascii_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randperm(VOCAB, generator=generator)[:PROPOSABLE]  # in no order
    return made.random_tensors(hidden=HIDDEN, window=WINDOW, width=WIDTH, ids=ids, generator=generator)


@pytest.fixture(scope="module")
def release(target: Path, tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("release"), target, tensors)


@pytest.fixture(scope="module")
def head(release: Path, target: Path) -> DraftHead:
    return DraftHead.load(release, target, threads=1)


class Plain:
    """The network as its definition reads."""

    def __init__(self, tensors: dict[str, Tensor], embedding: Tensor) -> None:
        self._w = {
            name.removesuffix(".weight"): tensor.float() * tensors[f"{name}.scale"][:, None]
            if tensor.dtype == torch.int8
            else tensor
            for name, tensor in tensors.items()
        }
        self._embedding = embedding

    def step(self, feature: Tensor, window: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The next feature [hidden] and logits [VOCAB]."""
        embedded = [self._embedding[token] for token in window[:WINDOW]]
        parts = [feature, *embedded, *[torch.zeros(HIDDEN)] * (WINDOW - len(embedded))]
        z = torch.cat([self._norm(part, self._w[f"norms.{i}"]) for i, part in enumerate(parts)])
        w = self._w
        o = w["skip"] @ z + w["down"] @ (torch.nn.functional.silu(w["gate"] @ z) * (w["up"] @ z))
        following = self._norm(o, w["out"])
        logits = torch.full((VOCAB,), -torch.inf)
        logits[w["vocabulary"].long()] = w["head"] @ following
        return following, logits

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean() + made.EPSILON).sqrt() * weight


@pytest.fixture(scope="module")
def plain(target: Path, tensors: dict[str, Tensor]) -> Plain:
    return Plain(tensors, load_file(target / "model.safetensors")["model.embed_tokens.weight"])


def states(count: int, seed: int = 0) -> list[bytes]:
    numbers = 3 * torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return [bytes(row.half().numpy().tobytes()) for row in numbers]


def rows(*samplings: Sampling, position: int = 9) -> list[Row]:
    return [Row(sampling, seed=40 + i, position=position + i) for i, sampling in enumerate(samplings)]


WINDOWS = [(5, 699, 0), (17,), (), (3, 3, 3, 9, 9)]


@pytest.mark.parametrize("kernel", ["8 bits", "float32"])
def test_the_network_is_that_of_the_definition(
    release: Path, target: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    if kernel == "float32":
        monkeypatch.setattr(int8_linear, "is_available", lambda: False)
    head = DraftHead.load(release, target)
    seen: list[Tensor] = []

    def watch(logits: Tensor, *_: object) -> tuple[list[int], list[float]]:
        seen.append(logits)
        return [0] * len(logits), [0.0] * len(logits)

    monkeypatch.setattr(draft_head, "sample_among", watch)
    features = head.start(states(4))
    for _ in range(3):
        expected = [plain.step(feature, window) for feature, window in zip(features.cpu(), WINDOWS, strict=True)]
        _, _, features = head.step(features, WINDOWS, rows(*[GREEDY] * 4))
        following = torch.stack([feature for feature, _ in expected])
        logits = torch.stack([found[found.isfinite()] for _, found in expected])
        assert logits.std() > 0.5, "or the comparison shows nothing"
        torch.testing.assert_close(features.cpu(), following, atol=3e-3, rtol=0)
        torch.testing.assert_close(seen[-1].cpu(), logits, atol=3e-3, rtol=0)


def test_a_sequence_does_not_depend_on_the_others_of_its_step(head: DraftHead) -> None:
    samplings = [GREEDY, Sampling(temperature=0.7, top_p=0.9), Sampling(temperature=1.2, top_k=20), GREEDY]
    together = head.step(head.start(states(4)), WINDOWS, rows(*samplings))
    for i, (window, row) in enumerate(zip(WINDOWS, rows(*samplings), strict=True)):
        tokens, likely, following = head.step(head.start([states(4)[i]]), [window], [row])
        assert tokens == together[0][i : i + 1]
        assert likely == pytest.approx(together[1][i : i + 1])
        torch.testing.assert_close(following[0], together[2][i])
    assert head.step(head.start([]), [], [])[:2] == ([], [])


def test_features_of_different_steps_go_together(head: DraftHead) -> None:
    first = head.step(head.start(states(2)), WINDOWS[:2], rows(GREEDY, GREEDY))
    fresh = head.start(states(1, seed=8))
    mixed = head.step([first[2][1], fresh[0]], [(1, 2, 3), (4, 5, 6)], rows(GREEDY, GREEDY))
    assert mixed[0][0] == head.step(first[2][1:], [(1, 2, 3)], rows(GREEDY))[0][0]
    assert mixed[0][1] == head.step(fresh, [(4, 5, 6)], rows(GREEDY))[0][0]


def adjustments(sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> Adjustments | None:
    return Adjustments.of(sampling, prompt, generated, [2])


def test_choices_are_those_of_the_sampler_over_the_whole_vocabulary(head: DraftHead, plain: Plain) -> None:
    """Same noise, same rules, the other tokens masked: what the target would take if these were its logits."""
    base: list[Sampling] = [
        GREEDY,
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.8),
        Sampling(temperature=1.3, top_k=7),
        Sampling(temperature=0.9, min_p=0.1),
        Sampling(temperature=0.8, logit_bias=dict.fromkeys(range(0, VOCAB, 2), -100.0)),
        Sampling(temperature=0.0, logit_bias={7: -100.0, 11: 100.0, 300: 3.0}),
        Sampling(temperature=0.6, frequency_penalty=2.0, presence_penalty=1.0, repetition_penalty=1.5),
        Sampling(temperature=0.0, frequency_penalty=2.0, min_tokens=50),
    ]
    samplings = [sampling for sampling in base for _ in range(6)]
    given = head.start(states(len(samplings), seed=1))
    windows = [(i, i + 1, i + 2) for i in range(len(samplings))]
    found = [plain.step(feature, window)[1] for feature, window in zip(given.cpu(), windows, strict=True)]
    frequent = [logits.topk(3).indices.tolist() for logits in found]
    asked = [
        Row(s, -i - 1, 200 + i, adjustments(s, [1, 2], top[:1]), tuple(top[1:]))
        for i, (s, top) in enumerate(zip(samplings, frequent, strict=True))
    ]
    tokens, likely, _ = head.step(given, windows, asked)
    expected = sample(torch.stack(found), asked)
    same = sum(a == b for a, b in zip(tokens, expected, strict=True))
    assert same >= len(tokens) - 1, "8-bit activations may decide between equals"
    assert len(set(tokens)) > 20
    for row, logits, token, chance in zip(asked[:6], found, tokens, likely, strict=False):
        assert chance == pytest.approx(float(logits.softmax(-1)[token]), rel=0.02), row
    for logits, token, chance in zip(found[12:18], tokens[12:], likely[12:], strict=False):
        assert chance == pytest.approx(float((logits / 0.7).softmax(-1)[token]), rel=0.02)


def test_tokens_are_only_those_that_it_has(head: DraftHead, tensors: dict[str, Tensor]) -> None:
    count, known = 64, set(tensors["vocabulary"].tolist())
    given = head.start(states(count, seed=2))
    for sampling in (GREEDY, Sampling(temperature=100.0)):
        tokens, _, _ = head.step(given, [(1, 2, 3)] * count, rows(*[sampling] * count))
        assert set(tokens) <= known
    assert CONTENDERS < PROPOSABLE, "or this does not reach beyond them"


@pytest.mark.parametrize(
    "hidden",
    [
        b"",
        bytes(2 * HIDDEN - 2),
        bytes(2 * HIDDEN + 2),
        bytes(2 * HIDDEN - 1),
        struct.pack("<32e", *[0] * 31, torch.nan),
    ],
)
def test_bytes_that_are_no_hidden_state(head: DraftHead, hidden: bytes) -> None:
    with pytest.raises(InvalidField) as caught:
        head.start([*states(1), hidden])
    assert caught.value.field == "hidden"


def test_what_leaves_no_token_is_named_by_row(head: DraftHead, tensors: dict[str, Tensor]) -> None:
    banned = dict.fromkeys(tensors["vocabulary"].tolist(), -100.0)
    nothing = Sampling(temperature=0.0, logit_bias=banned)
    asked = [*rows(GREEDY), Row(nothing, 0, 5, adjustments(nothing, [1], [])), *rows(GREEDY)]
    with pytest.raises(BadSpans) as caught:
        head.step(head.start(states(3)), [(1, 2, 3)] * 3, asked)
    assert caught.value.spans == (1,)
    features = head.start(states(2)).clone()
    features[1, 3] = torch.nan
    with pytest.raises(BadSpans) as caught:
        head.step(features, [(1, 2, 3)] * 2, rows(GREEDY, GREEDY))
    assert caught.value.spans == (1,)


def test_a_token_that_the_target_does_not_have(head: DraftHead) -> None:
    with pytest.raises(InvalidField, match="not below 700"):
        head.step(head.start(states(1)), [(VOCAB,)], rows(GREEDY))


def test_facts(head: DraftHead) -> None:
    info = head.info
    assert (info.hidden_size, info.window, info.vocab_size, info.proposable) == (HIDDEN, WINDOW, VOCAB, PROPOSABLE)
    assert (info.name, set(info.eos_ids)) == ("tiny", {2})


# Releases


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


def test_embeddings_that_do_not_fit(release: Path, target: Path, tmp_path: Path) -> None:
    about = draft_release.about(release)
    save_file({"model.embed_tokens.weight": torch.zeros(VOCAB - 1, HIDDEN)}, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"\(699, 32\), a draft head's target has \(700, 32\)"):
        draft_release.embedding(tmp_path, about)
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
