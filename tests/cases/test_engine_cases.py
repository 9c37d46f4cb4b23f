"""Failure cases of engines met in the field: what custom attention got wrong, silently.

Everything here is compared with plain transformers, a whole sequence at a time and without any cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from shared.engine import attention
from shared.engine.engine import Engine
from shared.engine.span import Span
from shared.errors import ModelError
from tests import tiny_models

B = 8
BLOCKS = 256
TOLERANCE = 1e-4


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(1000 * seed + length)
    return tuple(rng.randrange(3, tiny_models.VOCAB) for _ in range(length))


class Served:
    """A tiny model as its folder, as two workers' engines, and as plain transformers runs it."""

    def __init__(self, folder: Path, architecture: dict[str, Any]) -> None:
        self.folder = tiny_models.write(folder, architecture)
        self.engine = Engine.load(folder, block_size=B, kv_blocks=BLOCKS)
        self.elsewhere = Engine.load(folder, block_size=B, kv_blocks=BLOCKS)
        self._plain = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def expected(self, tokens: tuple[int, ...]) -> torch.Tensor:
        return self._plain(torch.tensor([tokens]), use_cache=False).logits[0]

    def cold(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """One chunk of most of it, then a token at a time."""
        blocks, cut = range(-(-len(tokens) // B)), max(len(tokens) - 3, 1)
        parts = [(0, cut), *((i, i + 1) for i in range(cut, len(tokens)))]
        return torch.cat([self.engine.forward([Span(tokens[a:b], a, tuple(blocks), b - a)]) for a, b in parts])

    def warm(self, tokens: tuple[int, ...], cached: int, *, of: int) -> torch.Tensor:
        """The first `cached` blocks come from another worker, which computed them within `of` tokens."""
        self.elsewhere.forward([Span(tokens[:of], 0, tuple(range(-(-of // B))))])
        blocks = tuple(range(60, 60 + -(-len(tokens) // B)))
        for there, here in zip(range(cached), blocks, strict=False):
            self.engine.write_block(here, bytes(self.elsewhere.read_block(there)))
        start = cached * B
        return self.engine.forward([Span(tokens[start:], start, blocks, len(tokens) - start)])


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    return lambda architecture, **changes: Served(tmp_path_factory.mktemp("tiny"), {**architecture, **changes})


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).abs().max() <= TOLERANCE
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def refused_without(monkeypatch: pytest.MonkeyPatch, folder: Path, **dropped: None) -> None:
    """The load check must notice an attention function that ignores this feature."""
    real = attention.attend

    def attend(query, key, value, tile, features, share):
        return real(query, key, value, tile, replace(features, **dropped), share)

    with monkeypatch.context() as patch:
        patch.setattr("shared.engine.probe.attend", attend)
        with pytest.raises(ModelError, match="other logits"):
            Engine.load(folder, kv_blocks=1)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_grouped_queries_and_odd_head_sizes(serve: Callable[..., Served], kv_heads: int, head_dim: int) -> None:
    """Case 29. Heads are wider together than the hidden size."""
    served = serve(
        tiny_models.ARCHITECTURES["llama"],
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )
    tokens = prompt(35)
    expected = served.expected(tokens)
    same(served.cold(tokens), expected)
    same(served.warm(tokens, 3, of=30), expected[3 * B :])
    assert served.engine.info.block_bytes == 2 * 2 * B * kv_heads * head_dim * 4


def test_soft_cap_is_applied(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 30: scores capped at 1.0, which flattens attention."""
    served = serve(tiny_models.ARCHITECTURES["gemma2"], attn_logit_softcapping=1.0)
    tokens = prompt(90)
    expected = served.expected(tokens)
    same(served.cold(tokens), expected)
    same(served.warm(tokens, 5, of=41), expected[5 * B :])
    refused_without(monkeypatch, served.folder, softcap=None)


def test_sinks_are_applied(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 30: a learned score per head that takes part in the softmax."""
    served = serve(tiny_models.ARCHITECTURES["gpt_oss-sinks"])
    tokens = prompt(90)
    expected = served.expected(tokens)
    same(served.cold(tokens), expected)
    same(served.warm(tokens, 5, of=41), expected[5 * B :])
    refused_without(monkeypatch, served.folder, sinks=None)


ORIGINAL = 32
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": ORIGINAL},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rope_below_and_above_the_original_length(serve: Callable[..., Served], kind: str) -> None:
    """Case 31. Blocks computed in a short text serve a long one, and the other way about."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    served = serve(tiny_models.ARCHITECTURES["llama"], rope_parameters=rope)
    long = prompt(200)
    for tokens in (long[: ORIGINAL - 10], long):
        expected = served.expected(tokens)
        same(served.cold(tokens), expected)
        for of in (ORIGINAL - 10, len(long)):
            same(served.warm(tokens, 2, of=min(of, len(tokens))), expected[2 * B :])
    unscaled = serve(tiny_models.ARCHITECTURES["llama"])
    assert (unscaled.expected(long) - served.expected(long)).abs().max() > 0.1, "the scaling would not be missed"


@pytest.mark.parametrize("name", ["dynamic-rope", "longrope"])
def test_rope_that_changes_with_length_is_refused(serve: Callable[..., Served], name: str) -> None:
    """Case 31: cached keys would be wrong as soon as a sequence grows."""
    architecture, _ = tiny_models.REFUSED[name]
    with pytest.raises(ModelError, match="depend on the longest sequence"):
        serve(architecture)


@pytest.mark.parametrize("name", ["mistral-window", "gemma3"])
def test_speculation_past_the_window_of_a_warm_prompt(serve: Callable[..., Served], name: str) -> None:
    """Case 32: window 32, a prompt of 100, most of it from elsewhere; drafts right and wrong, rolled back."""
    served = serve(tiny_models.ARCHITECTURES[name], sliding_window=32)
    text = prompt(160)
    expected = served.expected(text)
    same(served.warm(text[:100], 12, of=100), expected[12 * B : 100])
    blocks, start, rng = tuple(range(60, 60 + 22)), 100, random.Random(3)
    while start < 150:
        right = rng.randrange(6)
        drafts = text[start + 1 : start + 1 + right] + prompt(5 - right, seed=start)
        got = served.engine.forward([Span((text[start], *drafts), start, blocks, 6)])
        same(got[: right + 1], expected[start : start + 1 + right])
        start += right + 1


def test_a_tied_checkpoint_has_no_output_layer_of_its_own(serve: Callable[..., Served]) -> None:
    """Case 33. (That the built-in GGUF model's tokenizer gives the right ids is tested with its weights.)"""
    served = serve(tiny_models.ARCHITECTURES["llama-tied"])
    with safe_open(served.folder / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    tokens = prompt(20)
    same(served.cold(tokens), served.expected(tokens))


@dataclass
class Running:
    """A sequence half-way, in case 47. `text` is what it will have become; drafts that differ from it are wrong."""

    text: tuple[int, ...]
    expected: torch.Tensor
    blocks: tuple[int, ...]
    done: int = 0


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rows_of_a_batch_are_never_mixed(serve: Callable[..., Served], name: str) -> None:
    """Case 47: 32 sequences of a nonce each in every mixture of prefill chunks, single steps and verifications, some
    cancelled between steps, whose blocks the next ones get at once. Each row must be as if its sequence were alone."""
    served, rng = serve(tiny_models.ARCHITECTURES[name]), random.Random(47)
    free, running, begun, ended = list(range(BLOCKS)), list[Running](), 0, 0

    def begin() -> None:
        nonlocal begun
        begun += 1
        nonce, length = prompt(2, seed=begun), rng.choice([2, 7, 16, 40, 61])
        text = tuple(nonce[i % 2] if rng.random() < 0.7 else rng.randrange(3, 128) for i in range(length))
        taken = tuple(free.pop(rng.randrange(len(free))) for _ in range(-(-length // B)))
        running.append(Running(text, served.expected(text), taken))

    def end(sequence: Running) -> None:
        nonlocal ended
        ended += 1
        running.remove(sequence)
        free.extend(sequence.blocks)

    while ended < 60:
        while len(running) < 32:
            begin()
        batch = rng.sample(running, rng.randint(1, 32))
        spans, rights = zip(*(_next_span(sequence, rng) for sequence in batch), strict=True)
        got = iter(served.engine.forward(spans).split([span.rows for span in spans]))
        for sequence, right in zip(batch, rights, strict=True):
            same(next(got)[:right], sequence.expected[sequence.done : sequence.done + right])
            sequence.done += right
            if sequence.done == len(sequence.text) or rng.random() < 0.05:
                end(sequence)


def _next_span(sequence: Running, rng: random.Random) -> tuple[Span, int]:
    """A chunk of the prompt, a single token, or one with drafts; and how many of its tokens are right."""
    left = len(sequence.text) - sequence.done
    right = min(rng.choice([1, 1, 1, 2, 5, 20]), left)
    room = min(5, len(sequence.blocks) * B - sequence.done - right)
    wrong = prompt(rng.randint(0, room), seed=rng.randrange(1000))
    tokens = sequence.text[sequence.done : sequence.done + right] + wrong
    return Span(tokens, sequence.done, sequence.blocks, len(tokens)), right
