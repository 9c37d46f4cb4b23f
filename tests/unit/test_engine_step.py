"""The engine's facade: what it refuses, what it survives, what it samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.engine import attention
from shared.engine.base import BadSpans, StepEngine
from shared.engine.engine import Engine
from shared.engine.span import Span
from shared.errors import ConfigError, ContextLengthExceeded, FrameError, InvalidField, ModelError, RequestError
from shared.messages import Sampling
from shared.sampling.sampler import Row, sample
from tests import tiny_models

GREEDY = Sampling(temperature=0.0)
B = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("llama"), tiny_models.ARCHITECTURES["llama"])


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder, block_size=B, kv_blocks=80)


GOOD = Span((3, 4, 5, 6, 7), 0, (5, 9), 1, 0, GREEDY)


def test_it_is_a_step_engine(engine: Engine) -> None:
    as_protocol: StepEngine = engine
    info = as_protocol.info
    assert (info.context_length, info.vocab_size, info.layers) == (256, tiny_models.VOCAB, 3)
    assert info.block_bytes == 3 * 2 * B * 2 * 8 * 4
    assert (info.kv_blocks, info.block_size, info.dtype) == (80, B, "float32")
    assert engine.identity.block_bytes == info.block_bytes and engine.identity.codec == "none"
    assert engine.identity.fingerprint == info.fingerprint and len(info.fingerprint) == 64


@pytest.mark.parametrize(
    ("change", "error", "field"),
    [
        ({"token_ids": ()}, InvalidField, "rows"),
        ({"rows": 6}, InvalidField, "rows"),
        ({"rows": -1}, InvalidField, "rows"),
        ({"start": -1}, InvalidField, "start"),
        ({"start": 252}, ContextLengthExceeded, None),
        ({"token_ids": (1, 128), "rows": 0}, InvalidField, "token_ids"),
        ({"token_ids": (-1, 1), "rows": 0}, InvalidField, "token_ids"),
        ({"table": (5,)}, InvalidField, "table"),
        ({"table": ()}, InvalidField, "table"),
        ({"table": (5, 80)}, InvalidField, "table"),
        ({"table": (-1, 5)}, InvalidField, "table"),
        ({"table": (7, 5)}, InvalidField, "table"),  # block 7 is written by the other span
    ],
)
def test_a_wrong_span_is_refused_before_anything_is_written(
    engine: Engine, change: dict[str, object], error: type[RequestError], field: str | None
) -> None:
    expected = engine.step([GOOD])
    before = [bytes(engine.read_block(b)) for b in range(80)]
    other = Span((9, 8, 7), 0, (7,), 1, 0, GREEDY)
    with pytest.raises(error, match="span") as caught:
        engine.step([other, replace(GOOD, **change)])  # type: ignore[arg-type]
    assert caught.value.field == field
    assert before == [bytes(engine.read_block(b)) for b in range(80)]
    assert engine.step([GOOD]) == expected


def test_the_last_position_of_the_context(engine: Engine) -> None:
    tokens = tuple(i % 100 + 3 for i in range(256))
    assert len(engine.step([Span(tokens, 0, tuple(range(64)), 1, 0, GREEDY)])[0]) == 1


def test_spans_may_read_a_block_together(engine: Engine) -> None:
    prefix = (3, 4, 5, 6)
    engine.forward([Span(prefix, 0, (20,))])
    one, two = Span((7, 8), 4, (20, 21), 1), Span((9,), 4, (20, 22), 1)
    alone = [engine.forward([Span((*prefix, *s.token_ids), 0, (30, 31), 1)]) for s in (one, two)]
    torch.testing.assert_close(engine.forward([one, two]), torch.cat(alone), rtol=0, atol=1e-5)


def test_no_spans_and_no_rows(engine: Engine) -> None:
    assert engine.step([]) == []
    assert engine.step([replace(GOOD, rows=0)]) == [[]]
    assert engine.forward([replace(GOOD, rows=0)]).shape == (0, tiny_models.VOCAB)


def test_tokens_come_back_per_span_in_order(engine: Engine) -> None:
    spans = [replace(GOOD, rows=2), Span((9,) * 30, 0, tuple(range(10, 18)), 0), Span((8,), 0, (40,), 1, 0, GREEDY)]
    logits = engine.forward(spans)
    best = logits.argmax(-1).tolist()
    assert engine.step(spans) == [best[:2], [], best[2:]]


def test_noise_belongs_to_the_position_a_token_will_have(engine: Engine) -> None:
    """The token after position 4 is drawn alike whether it comes with others or alone, cached or not."""
    hot = Sampling(temperature=2.0)
    whole = Span((3, 4, 5, 6, 7), 0, (5, 9), 5, 77, hot)
    together = engine.step([whole])[0]
    alone = [engine.step([Span(whole.token_ids[i : i + 1], i, (5, 9), 1, 77, hot)])[0][0] for i in range(5)]
    assert together == alone
    assert together != engine.step([replace(whole, seed=78)])[0]


def test_positions_count_the_tokens_that_stand_before(engine: Engine) -> None:
    """What target and drafter must agree on: the token after a prompt of five has position 5."""
    hot = Sampling(temperature=2.0)
    spans = [Span((3, 4, 5, 6, 7), 0, (5, 9), 1, seed, hot) for seed in range(20)]
    logits = engine.forward(spans[:1])
    for span in spans:
        assert engine.step([span])[0] == sample(logits, [Row(hot, span.seed, 5)])


def test_an_error_in_the_middle_of_a_step_leaves_the_engine_usable(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.forward([GOOD])
    with monkeypatch.context() as patch:
        patch.setattr("shared.engine.attention.attend", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step([GOOD])
    assert torch.equal(engine.forward([GOOD]), expected)


def test_output_that_is_not_finite_is_blamed_on_its_spans(engine: Engine) -> None:
    engine.write_block(50, torch.full((engine.info.block_bytes // 4,), torch.nan).numpy().tobytes())
    poisoned = Span((7,), 4, (50, 51), 1, 0, GREEDY)
    good = replace(GOOD, rows=2)
    with pytest.raises(BadSpans) as caught:
        engine.step([good, poisoned, replace(good, table=(1, 2))])
    assert caught.value.spans == (1,)
    assert len(engine.step([good])[0]) == 2


def test_blocks_of_the_wrong_size_are_refused(engine: Engine) -> None:
    with pytest.raises(FrameError, match="bytes"):
        engine.write_block(0, b"abc")


def test_the_size_of_the_pool(folder: Path) -> None:
    block_bytes = 3 * 2 * 1024 * 2 * 8 * 4
    assert Engine.load(folder, block_size=1024, kv_memory_mb=1).info.kv_blocks == (1 << 20) // block_bytes
    with pytest.raises(ConfigError, match="one KV block takes"):
        Engine.load(folder, block_size=1024 * 64, kv_memory_mb=1)


def test_stages_are_reported(folder: Path) -> None:
    seen: list[tuple[str, float]] = []
    Engine.load(folder, kv_blocks=1, progress=lambda stage, done: seen.append((stage, done)))
    assert [done for _, done in seen] == sorted(done for _, done in seen) and seen[-1] == ("ready", 1.0)


def test_what_ends_a_text(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 13, "content": "<end>"}, {"id": 14, "content": "x"}]}'
    )
    assert Engine.load(tmp_path, kv_blocks=1).info.eos_ids == {2, 11, 12, 13}


def test_attention_that_does_not_reach_us_whole_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe compares logits with the model's own attention: here ours is given a wrong scale."""
    real = attention.attend

    def wrong(query, key, value, tile, features, share):
        return real(query, key, value, tile, replace(features, scale=features.scale * 3), share)

    monkeypatch.setattr("shared.engine.probe.attend", wrong)
    with pytest.raises(ModelError, match="other logits than by itself"):
        Engine.load(folder, kv_blocks=1)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        Engine.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        Engine.load(tmp_path)
