"""Steps of fixed capacity: padding changes nothing, and nothing in them waits for the device.

The kernels run in Triton's interpreter. Where a graph would be replayed, the same static step runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shared.engine import graphs
from shared.engine.attention import Paged, attending
from shared.engine.base import BadSpans, Sampled
from shared.engine.batch import build
from shared.engine.codecs.registry import CODECS
from shared.engine.engine import Engine, MakeRunner
from shared.engine.graphs import Shapes, StaticStep, TritonRunner
from shared.engine.model import Model, Output, load
from shared.engine.pool import KVPool, Tails
from shared.engine.runner import runner_for
from shared.engine.span import Span
from shared.kernels.meta import Capacity
from shared.messages import Sampling
from shared.sampling.device import choose
from shared.sampling.params import Row
from tests import tiny_models

B = 4
GREEDY = Sampling(temperature=0.0)
PROMPTS = [
    Span((3, 4, 5, 6, 7), 0, (5, 9, 2), 1, 0, GREEDY, 0),
    Span((8, 9), 0, (1, 3), 1, 0, GREEDY, 1),
    Span(tuple(range(20, 33)), 0, (10, 11, 12, 13, 14), 1, 0, GREEDY, 2),
]
DECODE = [
    Span((40,), 5, (5, 9, 2), 1, 0, GREEDY, 0),
    Span((41,), 2, (1, 3), 1, 0, GREEDY, 1),
    Span((42,), 13, (10, 11, 12, 13, 14), 1, 0, GREEDY, 2),
]
VERIFY = [replace(DECODE[0], token_ids=(40, 50, 51), rows=3), DECODE[1], replace(DECODE[2], token_ids=(42, 52), rows=2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    architecture = {**tiny_models.ARCHITECTURES["mistral-window"], "num_key_value_heads": 1, "num_hidden_layers": 1}
    return load(tiny_models.write(tmp_path_factory.mktemp("mistral"), architecture))


def engine_of(model: Model, codec: str = "none", runner: MakeRunner = runner_for) -> Engine:
    return Engine.of(
        model, fingerprint="f", vocabulary="v", block_size=B, kv_blocks=40, kv_codec=codec, slots=4, lookahead=3,
        runner=runner,
    )  # fmt: skip


def pool_of(model: Model, codec: str) -> KVPool:
    kv = CODECS[codec]
    return KVPool(model.shapes, 40, B, model.dtype, model.device, kv, Tails.of(kv, 4, 3, B))


def plainly(model: Model, pool: KVPool, spans: Sequence[Span]) -> Tensor:
    """The step over plain torch, finished."""
    batch = build(spans, B, model.device, pool.tails.ring)
    paged = Paged(pool, batch)
    with attending(paged):
        logits = model.forward(batch.token_ids, batch.positions, batch.rows).logits
    paged.keep()
    return logits


def states(sampled: Sequence[Sampled]) -> Tensor:
    """The hidden states reported, [rows, hidden_size]."""
    return torch.stack([torch.frombuffer(bytearray(h), dtype=torch.float16) for s in sampled for h in s.hidden or ()])


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("codec", "spans"), [("none", DECODE), ("none", VERIFY), ("int4", VERIFY)], ids=["decode", "verify", "verify-int4"]
)
@torch.inference_mode()
def test_padding_changes_nothing(model: Model, codec: str, spans: list[Span]) -> None:
    """After a full step of other sequences, whose numbers are left in what is padding now."""
    pool, twin = pool_of(model, codec), pool_of(model, codec)
    for p in (pool, twin):
        plainly(model, p, PROMPTS)
    capacity = Shapes.of(16, 3).fitting([*spans, DECODE[0], DECODE[0]], B)
    assert capacity is not None and capacity.tokens == 8 and capacity.queries == (1 if spans is DECODE else 4)
    step = StaticStep(model, pool, capacity)
    stale = [Span((60 + i,), 0, (20 + i,), 1, slot=3) for i in range(capacity.tokens)]
    step.load(stale)
    step.forward()
    for block in range(20, 36):
        pool.clear(block)
    before = [bytes(pool.block(b)) for b in range(pool.blocks)]
    step.load(spans)
    count = sum(span.rows for span in spans)
    logits, hidden = step.forward()
    assert logits.shape == (capacity.rows, tiny_models.VOCAB) and logits.isfinite().all()
    assert hidden.shape == (capacity.rows, model.hidden_size) and hidden.isfinite().all()
    assert close(logits[:count], plainly(model, twin, spans))
    step.keep()
    written = {span.table[p // B] for span in spans for p in range(span.start, span.start + len(span.token_ids))}
    changed = {b for b in range(pool.blocks) if bytes(pool.block(b)) != before[b]}
    assert changed <= written  # padding writes nowhere
    after = [replace(s, token_ids=(70,), start=s.start + len(s.token_ids), rows=1) for s in spans]
    step.load(after)
    assert close(step.forward().logits[: len(after)], plainly(model, twin, after))


def test_which_steps_are_captured() -> None:
    shapes = Shapes.of(200, 3)
    assert shapes.queries == (1, 4) and shapes.blocks == (16, 64, 256)
    fit = partial(shapes.fitting, block_size=B)
    assert fit(DECODE) == Capacity(tokens=4, sequences=4, queries=1, blocks=16, rows=4)
    assert fit(VERIFY) == Capacity(tokens=8, sequences=8, queries=4, blocks=16, rows=8)
    assert fit([replace(DECODE[0], start=16 * B)]) == Capacity(1, 1, 1, 64, 1)
    assert fit([PROMPTS[0]]) is None  # longer than any guess
    assert fit([DECODE[0]] * 256) is not None and fit([DECODE[0]] * 257) is None
    assert fit([replace(DECODE[0], start=256 * B)]) is None
    assert Shapes.of(16, 0).queries == (1,) and Shapes.of(16, 40).queries == (1, 16)
    assert all(fit([Span((0,), 0, (0,), 1)] * c.tokens) is not None for c in shapes.all())


class Stream:
    def wait_stream(self, other: object) -> None:
        pass


class Replay:
    """A graph that runs its work again, as a captured one does; capturing runs nothing."""

    def __init__(self, work: Callable[[], object], memory: object) -> None:
        self.replay = work


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Capacity]:
    """What has been captured."""
    captured: list[Capacity] = []

    class Recorded(graphs.CapturedStep):
        def __init__(self, step: StaticStep, *args: Any) -> None:
            captured.append(step.meta.capacity)
            super().__init__(step, *args)

    monkeypatch.setattr(graphs, "CapturedStep", Recorded)
    monkeypatch.setattr(graphs, "_captured", Replay)
    for name, stub in {"Stream": Stream, "current_stream": Stream, "stream": nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return captured


@pytest.mark.parametrize("codec", ["none", pytest.param("int4", marks=pytest.mark.slow)])
def test_an_engine_over_captured_steps_answers_alike(model: Model, made: list[Capacity], codec: str) -> None:
    plain, captured = engine_of(model, codec), engine_of(model, codec, runner=TritonRunner)
    ends = [8, 3, 15]
    later = [
        [replace(s, start=end + n, token_ids=(80 + n,)) for s, end in zip(DECODE, ends, strict=True)] for n in range(3)
    ]
    for spans in (PROMPTS, VERIFY, *later):  # the last ones replay what the first of them captured
        ours, theirs = (engine.sample([replace(s, hidden=True) for s in spans]) for engine in (captured, plain))
        assert [s.tokens for s in ours] == [s.tokens for s in theirs]
        torch.testing.assert_close(states(ours), states(theirs), rtol=0, atol=2e-3)
    first, second = ([engine.forward(s) for s in (later[2][:1], later[2][2:])] for engine in (captured, plain))
    assert close(torch.cat(first), torch.cat(second))  # each is the caller's own
    assert len(made) == len(set(made)) and {c.queries for c in made} == {1, 4}


def test_output_that_is_not_finite_is_blamed_on_its_spans(model: Model, made: list[Capacity]) -> None:
    engine = engine_of(model, runner=TritonRunner)
    engine.step(PROMPTS[1:2])
    engine.write_block(30, torch.full((engine.info.block_bytes // 4,), torch.nan).numpy().tobytes())
    poisoned = Span((7,), 4, (30, 31), 1, 0, GREEDY)
    with pytest.raises(BadSpans) as caught:
        engine.step([DECODE[1], poisoned])
    assert caught.value.spans == (1,)
    assert engine.step(DECODE[1:2]) and made


def test_a_model_that_cannot_be_captured_runs_as_it_comes(
    model: Model, made: list[Capacity], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        made.append(Capacity(0, 0, 0, 0, 0))
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "CapturedStep", refuse)
    plain, engine = engine_of(model), engine_of(model, runner=TritonRunner)
    for _ in range(2):
        assert engine.step(DECODE[:1]) == plain.step(DECODE[:1])
    assert len(made) == 1


def test_warming_up_captures_short_contexts_first(model: Model, made: list[Capacity], monkeypatch) -> None:
    def blank(step: StaticStep) -> Output:
        rows = step.meta.capacity.rows
        return Output(torch.zeros(rows, tiny_models.VOCAB), torch.zeros(rows, model.hidden_size))

    monkeypatch.setattr(StaticStep, "forward", blank)
    engine = engine_of(model, runner=TritonRunner)
    engine.warm_up()
    assert made == Shapes.of(40, 3).all() and made[0] == Capacity(1, 1, 1, 16, 1)
    made.clear()
    monkeypatch.setattr(graphs, "_WARM_UP_S", -1.0)
    engine_of(model, runner=TritonRunner).warm_up()
    assert made == []


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait for a CUDA device: numbers read back, and shapes that depend on contents."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not any(name.startswith(word) for word in self.FORBIDDEN), name
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a mask as an index"
        return func(*args, **(kwargs or {}))


@torch.no_grad()  # in inference mode the dispatcher shows composite operations, whatever they are made of
def test_nothing_in_a_step_waits_for_the_device(model: Model) -> None:
    pool = pool_of(model, "none")
    plainly(model, pool, PROMPTS)
    step = StaticStep(model, pool, Capacity.of(VERIFY, B))
    rows = [Row(Sampling(temperature=0.8, top_k=i * 5, top_p=0.9, min_p=0.01 * i), i, i) for i in range(6)]
    with NoWaiting():
        step.load(VERIFY)
        tokens = choose(step.forward().logits, rows)
    assert len(tokens) == 6
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWaiting():
        tokens[0].item()
