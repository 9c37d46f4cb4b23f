"""The draft head against plain float32, and what it chooses."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shared.engine import draft_head, int8_linear
from shared.engine.base import BadSpans
from shared.engine.draft_head import DraftHead
from shared.errors import InvalidField
from shared.messages import Sampling
from shared.sampling.adjustments import Adjustments
from shared.sampling.among import CONTENDERS
from shared.sampling.params import Row
from shared.sampling.sampler import sample
from tests import draft_release as made

HIDDEN, WINDOW, WIDTH, VOCAB, PROPOSABLE = 32, 3, 40, 700, 400
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_target(tmp_path_factory.mktemp("target"), vocab=VOCAB)


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


def test_what_is_drawn_is_among_the_contenders(head: DraftHead, plain: Plain) -> None:
    """So hot that each token is as likely as any other."""
    count = 64
    given = head.start(states(count, seed=2))
    ranked = [plain.step(feature, (1, 2, 3))[1].argsort(descending=True).tolist() for feature in given.cpu()]
    tokens, _, _ = head.step(given, [(1, 2, 3)] * count, rows(*[Sampling(temperature=100.0)] * count))
    ranks = sorted(order.index(token) for order, token in zip(ranked, tokens, strict=True))
    assert CONTENDERS * 0.9 < ranks[-1] < CONTENDERS + 4, "8-bit activations may change the order of neighbours"
    assert ranks[0] < CONTENDERS * 0.1 and CONTENDERS + 4 < PROPOSABLE


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
    assert (info.hidden_size, info.window, info.vocab_size) == (HIDDEN, WINDOW, VOCAB)
    assert (info.name, set(info.eos_ids)) == ("tiny", {2})
