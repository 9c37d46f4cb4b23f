"""The paged engine's logits are those of plain transformers, for every kind of architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.engine.engine import Engine
from shared.engine.span import Span
from shared.errors import ModelError
from tests import tiny_models

B = 8
LENGTHS = [1, B - 1, B, B + 1, 2 * B, 3 * B + 5, 70]
TOLERANCE = 1e-4


class Reference:
    """The unmodified model, whole sequences at a time and without any cache."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self._model(torch.tensor([tokens]), use_cache=False).logits[0]

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """After the final norm, as the LM head reads it."""
        return self._model.base_model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]


@pytest.fixture(scope="module", params=list(tiny_models.ARCHITECTURES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    return tiny_models.write(path, tiny_models.ARCHITECTURES[request.param])


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def load(folder: Path, **options: Any) -> Engine:
    return Engine.load(folder, block_size=B, kv_blocks=64, **options)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return load(folder)


@pytest.fixture(scope="module")
def other(folder: Path) -> Engine:
    """Another worker's engine over the same model."""
    return load(folder)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, tiny_models.VOCAB, (length,), generator=generator).tolist()


def table(first: int, length: int) -> tuple[int, ...]:
    """Blocks in falling order, so that position and place in the pool never agree by accident."""
    return tuple(range(first + -(-length // B) - 1, first - 1, -1))


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= TOLERANCE
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill(engine: Engine, reference: Reference, length: int) -> None:
    tokens = prompt(length)
    same(engine.forward([Span(tuple(tokens), 0, table(3, length), length)]), reference.logits(tokens))


def test_prefill_in_chunks_then_decode_then_verify(engine: Engine, reference: Reference) -> None:
    tokens = prompt(70)
    expected, blocks = reference.logits(tokens), table(0, 70)
    for start, end in [(0, 1), (1, 9), (9, 16), (16, 47), (47, 60), (60, 61), (61, 62), (62, 67), (67, 70)]:
        span = Span(tuple(tokens[start:end]), start, blocks, end - start)
        same(engine.forward([span]), expected[start:end])


@pytest.mark.parametrize("length", [B, 2 * B, 3 * B + 5, 70])
def test_blocks_computed_elsewhere(engine: Engine, other: Engine, reference: Reference, length: int) -> None:
    tokens, full = prompt(length), (length - 1) // B
    other.forward([Span(tuple(tokens), 0, table(0, length), 0)])
    for there, here in zip(table(0, length)[:full], table(20, length)[:full], strict=True):
        engine.write_block(here, bytes(other.read_block(there)))
    rest = Span(tuple(tokens[full * B :]), full * B, table(20, length), length - full * B)
    same(engine.forward([rest]), reference.logits(tokens)[full * B :])


def test_a_mixed_batch(engine: Engine, reference: Reference) -> None:
    """A whole prompt, a chunk, decode steps and a verification in one pass, rows in the order asked for."""
    cases = [(0, 40, 1), (23, 24, 1), (60, 61, 1), (16, 50, 2), (30, 35, 5), (0, 1, 1), (7, 8, 0)]
    texts = [prompt(end, seed) for seed, (_, end, _) in enumerate(cases)]
    first, spans, expected = 0, [], []
    for tokens, (start, end, rows) in zip(texts, cases, strict=True):
        blocks = table(first, end)
        first += len(blocks)
        if start:
            engine.forward([Span(tuple(tokens[:start]), 0, blocks)])
        spans.append(Span(tuple(tokens[start:]), start, blocks, rows))
        expected.append(reference.logits(tokens)[end - rows :])
    same(engine.forward(spans), torch.cat(expected))


def test_hidden_states_of_the_rows_that_ask(engine: Engine, reference: Reference) -> None:
    """A whole prompt, a verification that does not ask, a verification, a chunk without rows."""
    cases = [(0, 13, 2, True), (30, 34, 4, False), (40, 46, 6, True), (0, 8, 0, True)]
    texts = [prompt(end, seed) for seed, (_, end, _, _) in enumerate(cases)]
    spans = []
    for i, (tokens, (start, end, rows, asks)) in enumerate(zip(texts, cases, strict=True)):
        if start:
            engine.forward([Span(tuple(tokens[:start]), 0, table(10 * i, end))])
        spans.append(Span(tuple(tokens[start:]), start, table(10 * i, end), rows, hidden=asks))
    told = [sampled.hidden for sampled in engine.sample(spans)]
    assert told[1] is None and told[3] is None
    for i in (0, 2):
        expected = reference.hidden(texts[i])[-cases[i][2] :]
        assert expected.shape[1] == engine.info.hidden_size
        got = torch.stack([torch.frombuffer(bytearray(state), dtype=torch.float16) for state in told[i] or ()])
        torch.testing.assert_close(got.float(), expected, rtol=2e-3, atol=2e-3)


def test_drafts_that_were_wrong_leave_no_trace(engine: Engine, reference: Reference) -> None:
    """Each step verifies four drafts, of which the first few are right; the next step starts after those. Far past
    the windows of the models that have one."""
    tokens, blocks = prompt(100), table(0, 100 + 8)
    expected = reference.logits(tokens)
    engine.forward([Span(tuple(tokens[:57]), 0, blocks)])
    start = 57
    for right in (0, 4, 2, 0, 1, 3, 4, 0, 2, 4, 1, 4, 0, 3):
        drafts = tokens[start + 1 : start + 1 + right] + prompt(4 - right, seed=start)
        got = engine.forward([Span((tokens[start], *drafts), start, blocks, 5)])
        same(got[: right + 1], expected[start : start + right + 1])
        start += right + 1
    assert start == 99


def test_what_a_recycled_block_held_does_not_matter(engine: Engine, reference: Reference) -> None:
    """Even NaN: a block from a broken peer must not reach the next sequence that gets its place."""
    nan = torch.full((engine.info.block_bytes // 4,), torch.nan).numpy().tobytes()
    for block in range(engine.info.kv_blocks):
        engine.write_block(block, nan)
    texts = [prompt(2 * B + 3), prompt(3 * B + 6), prompt(1)]  # unequal, so that the shorter ones are padded
    tables = [table(5, 40), table(20, 40), table(30, 40)]
    for text, blocks in zip(texts, tables, strict=True):
        if len(text) > 1:
            engine.forward([Span(tuple(text[:-1]), 0, blocks)])
    steps = [Span((t[-1],), len(t) - 1, blocks, 1) for t, blocks in zip(texts, tables, strict=True)]
    same(engine.forward(steps), torch.stack([reference.logits(t)[-1] for t in texts]))


@pytest.mark.parametrize("name", tiny_models.REFUSED)
def test_models_that_would_not_be_exact_are_refused(name: str, tmp_path: Path) -> None:
    architecture, reason = tiny_models.REFUSED[name]
    tiny_models.write(tmp_path, architecture)
    with pytest.raises(ModelError, match=reason):
        load(tmp_path)


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    tiny_models.write(tmp_path, tiny_models.ARCHITECTURES["llama"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_encoder_decoder": True}))
    with pytest.raises(ModelError, match="encoder-decoder"):
        load(tmp_path)


def test_the_first_layers_alone(tmp_path: Path) -> None:
    tiny_models.write(tmp_path, tiny_models.ARCHITECTURES["gemma2"])
    engine = load(tmp_path, layers=2)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    whole.model.layers = whole.model.layers[:2]
    whole.config.num_hidden_layers = 2
    tokens = prompt(20)
    with torch.inference_mode():
        expected = whole(torch.tensor([tokens]), use_cache=False).logits[0]
    same(engine.forward([Span(tuple(tokens), 0, table(0, 20), 20)]), expected)
    assert engine.info.layers == 2
    assert engine.info.fingerprint != load(tmp_path).info.fingerprint
    for layers in (0, 4, -1):
        with pytest.raises(ModelError, match="layers asked for"):
            load(tmp_path, layers=layers)
