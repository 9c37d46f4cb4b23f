"""Whole models over the kernels give the logits that they give over plain torch: what architectures ask for arrives."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from shared.engine.engine import Engine
from shared.engine.graphs import TritonRunner
from shared.engine.model import load
from shared.engine.span import Span
from tests import tiny_models

B = 4
STEPS = [
    [Span(tuple(range(3, 14)), 0, (7, 2, 9, 4, 1), 2, slot=0), Span((20, 21), 0, (3, 8), 1, slot=1)],
    [Span((22, 23, 24, 25), 2, (3, 8), 3, slot=1), Span((14,), 11, (7, 2, 9, 4, 1), 1, slot=0)],
    [Span((15, 16, 17), 12, (7, 2, 9, 4, 1), 3, slot=0)],
]


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("gemma2", "none"),  # soft-cap, and a window in every other layer
        ("gpt_oss-sinks", "int8"),
        ("deepseek_v3", "int4"),  # keys are wider than values
        ("llama-untied-mqa", "fp8_e4m3"),  # heads of 20 channels, one KV head
        ("gpt2", "none"),
    ],
)
def test_logits(tmp_path_factory: pytest.TempPathFactory, kind: str, codec: str) -> None:
    architecture = dict(tiny_models.ARCHITECTURES[kind])
    if kind != "gemma2":  # a deeper layer's numbers differ in the last bit, which may tip a code over
        architecture["n_layer" if kind == "gpt2" else "num_hidden_layers"] = 1
    model = load(tiny_models.write(tmp_path_factory.mktemp(kind), architecture))
    make = partial(
        Engine.of, model, fingerprint="f", vocabulary="v", block_size=B, kv_blocks=10, kv_codec=codec, slots=2,
        lookahead=3,
    )  # fmt: skip
    torch_engine, engine = make(), make(runner=partial(TritonRunner, graphs=False))
    for spans in STEPS:
        torch.testing.assert_close(engine.forward(spans), torch_engine.forward(spans), rtol=1e-4, atol=1e-4)
