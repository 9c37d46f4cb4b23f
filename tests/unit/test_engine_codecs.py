"""With every KV codec the same text gives the same logits, however it is computed.

The models run in float64. Different cuts of a text give keys that differ in the last bits, and a number that lies
between two codes may then get the other one, which moves logits by a whole step. In float32 that would happen now and
then, and a tolerance wide enough for it would hide real mistakes. In float64 the differences are a billion times
smaller, and vanish when the codec takes its float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.engine import attention
from shared.engine.base import BadSpans
from shared.engine.engine import Engine
from shared.engine.model import Model, load
from shared.engine.span import Span
from shared.errors import InvalidField
from shared.messages import Sampling
from tests import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")  # float32 norms in a float64 model

B, SLOTS, LOOKAHEAD = 8, 4, 4
LENGTH = 61
TOLERANCE = 1e-5
CODECS = ("none", "int8", "fp8_e4m3", "int4")
ARCHITECTURES = ("llama", "deepseek_v3", "gemma2", "gpt_oss-sinks")
"""Plain; keys wider than values; window and soft cap; window and sinks."""


def double(folder: Path) -> Model:
    model = load(folder)
    model.module.set_experts_implementation("eager")  # the fast one has no float64
    return replace(model, module=model.module.double(), dtype=torch.float64)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    return double(tiny_models.write(folder, tiny_models.ARCHITECTURES[request.param]))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return double(tiny_models.write(tmp_path_factory.mktemp("one"), tiny_models.ARCHITECTURES["llama"]))


def engine_of(model: Model, codec: str) -> Engine:
    return Engine.of(
        model,
        fingerprint="tiny",
        vocabulary="tiny",
        block_size=B,
        kv_blocks=48,
        kv_codec=codec,
        slots=SLOTS,
        lookahead=LOOKAHEAD,
    )


def text(seed: int = 0, length: int = LENGTH) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, tiny_models.VOCAB, (length,), generator=generator).tolist())


def table(number: int) -> tuple[int, ...]:
    """Of one sequence, in falling order."""
    return tuple(range(8 * number + 7, 8 * number - 1, -1))


def whole(tokens: Sequence[int], start: int = 0, number: int = 0, slot: int = 0) -> Span:
    """The rest of a sequence from `start` on, with logits for all of it."""
    return Span(tuple(tokens[start:]), start, table(number), len(tokens) - start, slot=slot)


def cut(tokens: Sequence[int], ends: Sequence[int], engine: Engine, number: int = 0, slot: int = 0) -> Tensor:
    """Logits of all positions, computed span by span."""
    starts = [0, *ends[:-1]]
    return torch.cat([engine.forward([whole(tokens[:b], a, number, slot)]) for a, b in zip(starts, ends, strict=True)])


def same(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= TOLERANCE


def with_wrong_guesses(engine: Engine, tokens: Sequence[int], number: int, slot: int) -> Tensor:
    """Token by token, each time with four guesses of which the last ones are wrong, and going back."""
    rows, at, wrong = [], 0, text(99, 2 * LENGTH)
    while at < len(tokens):
        right = min(at % (LOOKAHEAD + 1), len(tokens) - at - 1)
        guesses = (*tokens[at + 1 : at + 1 + right], *wrong[at : at + LOOKAHEAD - right])
        span = Span((tokens[at], *guesses), at, (*table(number), 40 + number), 1 + LOOKAHEAD, slot=slot)
        rows.append(engine.forward([span])[: 1 + right])
        at += 1 + right
    return torch.cat(rows)


@pytest.mark.parametrize("codec", CODECS)
def test_logits_do_not_depend_on_how_a_text_is_computed(model: Model, codec: str) -> None:
    tokens = text()
    engine = engine_of(model, codec)
    expected = engine.forward([whole(tokens)])
    for ends in ([1, 9, 16, 29, 30, LENGTH], [B - 1, B, 2 * B + 1, 40, 59, LENGTH]):
        same(cut(tokens, ends, engine, number=1, slot=1), expected)
    same(cut(tokens, range(1, LENGTH + 1), engine, number=2, slot=2), expected)
    same(with_wrong_guesses(engine, tokens, number=3, slot=3), expected)
    other = engine_of(model, codec)
    for full in (1, 3, (LENGTH - 1) // B):
        for here, there in zip(table(4)[:full], table(3)[:full], strict=True):  # those that saw wrong guesses
            other.write_block(here, bytes(engine.read_block(there)))
        same(other.forward([whole(tokens, full * B, number=4)]), expected[full * B :])


@pytest.mark.parametrize("codec", CODECS)
def test_logits_do_not_depend_on_neighbours(model: Model, codec: str) -> None:
    """A prompt, a chunk, a decode step and a verification in one step, over and over."""
    texts = [text(seed) for seed in range(4)]
    alone = engine_of(model, codec)
    expected = [alone.forward([whole(tokens)]) for tokens in texts]
    engine = engine_of(model, codec)
    ends = [[17, 18, 23, 24, 60, LENGTH], [1, 2, 3, 8, 9, 14], [40, 41, 42, 47, 48, 49], [5, 16, 32, 33, 38, LENGTH]]
    starts = [0] * 4
    for step in range(6):
        spans = [
            Span(texts[i][starts[i] : ends[i][step]], starts[i], table(i), ends[i][step] - starts[i], slot=3 - i)
            for i in range(4)
        ]
        wanted = [expected[i][starts[i] : ends[i][step]] for i in range(4)]
        same(engine.forward(spans), torch.cat(wanted))
        starts = [ends[i][step] for i in range(4)]


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.1), ("fp8_e4m3", 0.3), ("int4", 1.0)])
def test_logits_are_those_of_the_plain_model_but_for_the_codec(llama: Model, codec: str, most: float) -> None:
    tokens = text()
    expected = engine_of(llama, "none").forward([whole(tokens)])
    difference = (engine_of(llama, codec).forward([whole(tokens)]) - expected).abs()
    assert 0 < difference.max() <= most


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("start", [13, 16])
def test_a_step_that_failed_can_be_repeated(
    llama: Model, codec: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It broke off in the last layer, when earlier ones had written, and filled blocks, already."""
    tokens = text()
    engine = engine_of(llama, codec)
    expected = engine.forward([whole(tokens)])
    engine.forward([whole(tokens[:start], 0, 1, 1)])
    real, calls = attention.attend, 0

    def attend(*arguments: object) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("broken")
        return real(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(attention, "attend", attend)
        with pytest.raises(RuntimeError, match="broken"):
            engine.forward([whole(text(5)[:start] + text(6)[start:40], start, 1, 1)])
    same(engine.forward([whole(tokens[:35], start, 1, 1)]), expected[start:35])
    same(engine.forward([whole(tokens, 35, 1, 1)]), expected[35:])


@pytest.mark.parametrize("codec", CODECS)
def test_neighbours_of_a_bad_span_can_be_stepped_again(llama: Model, codec: str) -> None:
    tokens = text()
    engine = engine_of(llama, codec)
    expected = engine.forward([whole(tokens)])
    engine.forward([whole(tokens[:13], 0, 1, 1)])
    engine.write_block(40, b"\xff" * engine.info.block_bytes)
    good = replace(whole(tokens[:20], 13, 1, 1), sampling=Sampling(temperature=0.0))
    bad = Span((5,), B, (40, 41), 1, slot=2)
    with pytest.raises(BadSpans) as caught:
        engine.step([bad, good])
    assert caught.value.spans == (0,)
    assert engine.step([good]) == [expected[13:20].argmax(-1).tolist()]
    same(engine.forward([whole(tokens, 20, 1, 1)]), expected[20:])


def test_a_slot_keeps_nothing_of_its_last_sequence(llama: Model) -> None:
    """Also when that one's keys were not finite."""
    tokens = text()
    engine = engine_of(llama, "int4")
    expected = engine.forward([whole(tokens)])
    engine.forward([whole(text(7)[:29], 0, 1, 1)])
    for layer in engine._pool.layers:
        ring = engine._pool.tails.ring
        layer.tail[ring : 2 * ring] = torch.nan
    same(cut(tokens, [3, 4, 11, 40, LENGTH], engine, number=2, slot=1), expected)


def test_keys_that_a_slot_does_not_hold_are_missed(llama: Model) -> None:
    engine = engine_of(llama, "int4")
    tokens = text()
    engine.forward([whole(tokens[:20], 0, 0, 0)])
    for span, reason in [
        (whole(tokens, 20, 0, 1), "slot 1 holds 0 to 0"),  # another's slot
        (whole(tokens, 22, 0, 0), "slot 0 holds 8 to 20"),  # a gap
        (whole(tokens, 20, 0, SLOTS), "slot 4 is not below 4"),
        (whole(tokens, 20, 0, -1), "slot -1"),
    ]:
        with pytest.raises(InvalidField, match=reason) as caught:
            engine.forward([span])
        assert caught.value.field == "slot"
    with pytest.raises(InvalidField, match="taken twice"):
        engine.forward([whole(tokens, 20, 0, 0), whole(tokens, 0, 1, 0)])
    engine.forward([whole(tokens, 16, 0, 1)])  # a block's beginning needs nothing
    assert engine_of(llama, "int8").forward([whole(tokens[:9], 5, 0, 99)]).isfinite().all()  # has no slots


def test_going_back_as_far_as_promised(llama: Model) -> None:
    tokens = text()
    engine = engine_of(llama, "int4")
    expected = engine.forward([whole(tokens)])
    for back in range(1, LOOKAHEAD + 1):
        for end in range(2 * B, 3 * B):
            engine.forward([whole(tokens[: end - 6], 0, 1, 1)])
            engine.forward([whole((*tokens[: end - back], *text(9)[:back]), end - 6, 1, 1)])
            same(engine.forward([whole(tokens[: end + 3], end - back, 1, 1)]), expected[end - back : end + 3])


def test_engines_of_different_codecs_do_not_pass_for_one_another(llama: Model) -> None:
    engines = [engine_of(llama, codec) for codec in CODECS]
    assert len({engine.identity for engine in engines}) == len(CODECS)
    assert [engine.identity.codec for engine in engines] == list(CODECS)
    assert [engine.info.slots for engine in engines] == [0, 0, 0, SLOTS]
    sizes = [engine.info.block_bytes for engine in engines]
    assert sizes == [engine.identity.block_bytes for engine in engines] and sizes[3] < sizes[1] < sizes[0]
