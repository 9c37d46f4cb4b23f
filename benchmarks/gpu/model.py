"""A model of a real one's shape with random weights: our engine, eager and captured, against transformers itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Line
from shared.engine.attention import NAME
from shared.engine.base import Sampled
from shared.engine.codecs.registry import codec_of
from shared.engine.engine import Engine
from shared.engine.graphs import StaticStep
from shared.engine.model import Model
from shared.engine.pool import KVPool
from shared.engine.span import Span
from shared.kernels.meta import Capacity
from shared.messages import Sampling
from shared.sampling.adjustments import Adjustments
from shared.sampling.device import choose
from shared.sampling.params import Row
from shared.sampling.processing import adjusted

GREEDY = Sampling(temperature=0.0)
DTYPE = torch.bfloat16
GUESSES = 4


class ModelChecks:
    """The model is built once, by the first check that needs it."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._model: Model | None = None
        self._rates: dict[str, float] = {}

    @property
    def model(self) -> Model:
        if self._model is None:
            with torch.device(self._bench.device):
                config = AutoConfig.for_model("llama", **self._bench.sizes.model)
                module = AutoModelForCausalLM.from_config(config, dtype=DTYPE)  # type: ignore[no-untyped-call]
            self._model = Model.of(module)
        return self._model

    def build(self) -> Iterator[Line]:
        began = time.perf_counter()
        count = sum(p.numel() for p in self.model.module.parameters())
        yield Line("parameters", count / 1e9, "billions", f"built in {time.perf_counter() - began:.1f} s")

    def exact(self) -> Iterator[Line]:
        """Captured steps, padded, against eager ones; and steps that would wait for the device fail."""
        s = self._bench.sizes
        spans = [Span((3 + i,), 0, (i,), 1, i, GREEDY) for i in range(3)]
        engines = [self._engine(4, s.block_size, graphs=graphs) for graphs in (False, True)]
        for step in range(3):
            again = [Span((3 + i + step,), step, (i,), 1, i, GREEDY, hidden=True) for i in range(3)]
            eager, captured = (engine.forward(again) for engine in engines)
        difference = float((eager - captured).abs().max() / eager.abs().max())
        yield Line("captured against eager logits", difference, "of the largest", ok=difference <= 0.03)
        eager, captured = (_states(engine.sample(again)) for engine in engines)
        difference = float((eager - captured).abs().max() / eager.abs().max())
        yield Line("captured against eager hidden states", difference, "of the largest", ok=difference <= 0.03)
        pool = KVPool(self.model.shapes, 4, s.block_size, DTYPE, self._bench.device, codec_of("none"))
        with torch.inference_mode():
            waits = _waits(self._bench, StaticStep(self.model, pool, Capacity.of(spans, s.block_size)), spans)
        yield Line("host waits inside a step", waits, ok=True)

    def decoding(self, graphs: bool) -> Iterator[Line]:
        s, name = self._bench.sizes, "graphs" if graphs else "eager"
        for batch in s.batches:
            engine = self._engine(batch, s.context + s.steps + 4, graphs=graphs)
            rate, first = self._decode(engine, batch, s.context)
            self._rates[f"{name} {batch}"] = rate
            note = f"first step {first:.2f} s, with capture" if graphs else f"first step {first:.2f} s"
            yield Line(f"{name}, batch {batch}, context {s.context}", rate, "tokens/s", note)
            del engine
            self._bench.free()

    def verifying(self) -> Iterator[Line]:
        """Steps of one token and of a few guesses, both captured."""
        s = self._bench.sizes
        for batch in s.batches[:2]:
            engine = self._engine(batch, s.context + (s.steps + 3) * (1 + GUESSES), graphs=True, lookahead=GUESSES)
            one, _ = self._decode(engine, batch, s.context)
            several, _ = self._decode(engine, batch, s.context, 1 + GUESSES)
            case = f"{1 + GUESSES} positions against 1, batch {batch}"
            yield Line(case, one / several * (1 + GUESSES), "times the step")
            del engine
            self._bench.free()

    def with_codec(self, codec: str) -> Iterator[Line]:
        s, batch = self._bench.sizes, self._bench.sizes.batches[1]
        engine = self._engine(batch, s.codec_context + s.steps + 4, codec=codec, graphs=True)
        rate, _ = self._decode(engine, batch, s.codec_context)
        yield Line(f"{codec}, batch {batch}, context {s.codec_context}", rate, "tokens/s", "graphs")

    def prefilling(self) -> Iterator[Line]:
        s = self._bench.sizes
        engine = self._engine(1, s.prefill, graphs=False)
        span = Span(tuple(range(2, 2 + s.prefill)), 0, tuple(range(-(-s.prefill // s.block_size))), 1, 0, GREEDY)
        self._rates["prefill"] = s.prefill / self._bench.wall(lambda: engine.step([span]), 3)
        yield Line(f"{s.prefill} tokens", self._rates["prefill"], "tokens/s")

    def peer(self, cache: type[Any], compiled: bool = False) -> Iterator[Line]:
        """transformers with the same weights: a batch of equal lengths, tokens read back after each step."""
        s, module = self._bench.sizes, self.model.module
        module.set_attn_implementation("sdpa")
        try:
            with torch.inference_mode():
                call = torch.compile(module, mode="reduce-overhead", fullgraph=True) if compiled else module
                for batch in s.batches[:2] if compiled else s.batches:
                    rate = self._peer_decode(module, call, batch, cache)
                    yield Line(f"batch {batch}", rate, "tokens/s", self._compare(f"graphs {batch}", rate))
                    self._bench.free()
                if not compiled:
                    ids = torch.arange(2, 2 + s.prefill, device=self._bench.device)[None]
                    rate = s.prefill / self._bench.wall(partial(_peer_prefill, module, ids, s.prefill, cache), 3)
                    yield Line(f"prefill, {s.prefill} tokens", rate, "tokens/s", self._compare("prefill", rate))
        finally:
            module.set_attn_implementation(NAME)
            self._bench.free()

    def _compare(self, ours: str, rate: float) -> str:
        return f"ours is {self._rates[ours] / rate:.2f} times that" if ours in self._rates else ""

    def _engine(self, batch: int, length: int, *, graphs: bool, codec: str = "none", lookahead: int = 0) -> Engine:
        size = self._bench.sizes.block_size
        return Engine.of(
            self.model,
            fingerprint="random",
            vocabulary="none",
            block_size=size,
            kv_blocks=batch * -(-length // size),
            kv_codec=codec,
            slots=batch,
            lookahead=lookahead,
            runner=self._bench.runner(graphs),
        )

    def _decode(self, engine: Engine, batch: int, context: int, width: int = 1) -> tuple[float, float]:
        """(tokens per second, seconds of the first step) at `width` tokens a step and sequence. What is in the KV does
        not matter for speed: zeros."""
        each = engine.info.kv_blocks // batch
        tables = [tuple(range(i * each, (i + 1) * each)) for i in range(batch)]
        tokens = [[3 + i] * width for i in range(batch)]
        times: list[float] = []
        for step in range(self._bench.sizes.steps + 3):
            position = context + step * width
            spans = [Span(tuple(tokens[i]), position, tables[i], width, i, GREEDY, i) for i in range(batch)]
            began = time.perf_counter()
            tokens = engine.step(spans)
            times.append(time.perf_counter() - began)
        return batch * width / statistics.median(times[3:]), times[0]

    def _peer_decode(self, module: Any, call: Any, batch: int, cache: type[Any]) -> float:
        s = self._bench.sizes
        ids = torch.arange(2, 2 + s.context, device=self._bench.device).expand(batch, -1)
        kv, tokens = _peer_prefill(module, ids, s.context + s.steps + 8, cache)
        times: list[float] = []
        for _ in range(s.steps + 5):
            began = time.perf_counter()
            out = call(input_ids=tokens[:, None].clone(), past_key_values=kv, use_cache=True, logits_to_keep=1)
            tokens = out.logits[:, -1].argmax(-1)
            tokens.tolist()
            times.append(time.perf_counter() - began)
        return batch / statistics.median(times[5:])


def _peer_prefill(module: Any, ids: Tensor, room: int, cache: type[Any]) -> tuple[Any, Tensor]:
    kv = cache(config=module.config, **({"max_cache_len": room} if cache is StaticCache else {}))
    out = module(input_ids=ids, past_key_values=kv, use_cache=True, logits_to_keep=1)
    return kv, out.logits[:, -1].argmax(-1)


def _states(sampled: Sequence[Sampled]) -> Tensor:
    """The hidden states reported, [rows, hidden_size]."""
    states = [torch.frombuffer(bytearray(state), dtype=torch.float16) for s in sampled for state in s.hidden or ()]
    return torch.stack(states).float()


def _waits(bench: Bench, step: StaticStep, spans: Sequence[Span]) -> str:
    sampling = Sampling(
        temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias={3: -100}, min_tokens=4
    )
    rows = [Row(sampling, i, i, Adjustments.of(sampling, [0, 1], [2], [2])) for i in range(len(spans))]
    for strict in (False, True):  # kernels are compiled first
        if bench.cuda and strict:
            torch.cuda.set_sync_debug_mode("error")
        try:
            step.load(spans)
            tokens = choose(adjusted(step.forward().logits, rows), rows)
        finally:
            if bench.cuda:
                torch.cuda.set_sync_debug_mode("default")
    tokens.tolist()
    return "none" if bench.cuda else "not seen without a GPU"
