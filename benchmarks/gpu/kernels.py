"""Kernels against float64 attention over what the codecs' torch code reads back, and against the bytes it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, tables
from benchmarks.gpu.report import Line
from shared.engine.attention import Features
from shared.engine.codecs.base import Codec, LayerShape, PerBlock, PerToken
from shared.engine.codecs.registry import codec_of
from shared.engine.pool import KVPool, LayerKV, Tails
from shared.engine.span import Span
from shared.kernels.meta import StepMeta
from shared.kernels.paged import TritonPaged

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest error of an output, relative to the largest output."""
LOOKAHEAD = 16


@dataclass
class Sequences:
    """Ragged sequences of random numbers. `query`, `key` and `value`: of each, [heads, positions, dim]."""

    lengths: Sequence[tuple[int, int]]
    tables: list[tuple[int, ...]]
    query: list[Tensor]
    key: list[Tensor]
    value: list[Tensor]

    @classmethod
    def random(cls, bench: Bench, lengths: Sequence[tuple[int, int]], dtype: torch.dtype, first: int) -> Sequences:
        s, ends = bench.sizes, [start + tokens for start, tokens in lengths]
        query = [bench.randn(s.heads, end, s.dim, dtype=dtype) * 2 for end in ends]
        key = [bench.randn(s.kv_heads, end, s.dim, dtype=dtype) for end in ends]
        value = [bench.randn(s.kv_heads, end, s.dim, dtype=dtype) for end in ends]
        return cls(lengths, tables(lengths, s.block_size, first), query, key, value)

    def step(self, pool: KVPool, features: Features, past: bool) -> Tensor:
        """Put the past, or what comes after it, through the kernels: [tokens, heads, dim]."""
        cuts = [(0, start) if past else (start, start + tokens) for start, tokens in self.lengths]
        live = [i for i, (first, last) in enumerate(cuts) if last > first]
        spans = [Span((0,) * (cuts[i][1] - cuts[i][0]), cuts[i][0], self.tables[i], slot=i) for i in live]
        meta = StepMeta.of(spans, pool.block_size, self.query[0].device, pool.tails.ring)
        sink = TritonPaged(pool, meta)
        q, k, v = (
            torch.cat([tensors[i][:, slice(*cuts[i])] for i in live], 1)
            for tensors in (self.query, self.key, self.value)
        )
        out = sink.attend(0, q, k, v, features)
        sink.keep()
        return out


def errors(bench: Bench, codec: Codec) -> Iterator[Line]:
    s = bench.sizes
    scale = s.dim**-0.5
    sinks = bench.randn(s.heads) * 2
    everything = Features(scale, s.window, 20.0, sinks)
    features = {
        "plain": Features(scale), "window": Features(scale, s.window), "softcap": Features(scale, softcap=20.0),
        "sinks": Features(scale, sinks=sinks), "all of these": everything,
    }  # fmt: skip
    for name, wanted in features.items():
        yield _line(bench, f"{name}, bf16", codec, wanted, torch.bfloat16)
    yield _line(bench, "all of these, fp16", codec, everything, torch.float16)


def addressing(bench: Bench) -> Iterator[Line]:
    """A pool of more numbers per layer than 32 bits count, its highest blocks in use."""
    s = bench.sizes
    for name in ("none", "int8"):
        layer = KVPool([_shape(bench)], 1, s.block_size, torch.bfloat16, bench.device, codec_of(name)).layers[0]
        unused = s.huge_elements // layer.views["keys"].stride(0)
        case = f"{name}, block {unused} and up"
        yield _line(bench, case, codec_of(name), Features(s.dim**-0.5), torch.bfloat16, unused)
        bench.free()


def _shape(bench: Bench) -> LayerShape:
    return LayerShape(bench.sizes.kv_heads, bench.sizes.dim, bench.sizes.dim)


def _line(bench: Bench, case: str, codec: Codec, features: Features, dtype: torch.dtype, first: int = 0) -> Line:
    worst, wrong = 0.0, 0
    for lengths in (bench.sizes.ragged, bench.sizes.decoding):
        sequences = Sequences.random(bench, lengths, dtype, first)
        blocks = first + sum(map(len, sequences.tables))
        tails = Tails.of(codec, len(lengths), LOOKAHEAD, bench.sizes.block_size)
        pool = KVPool([_shape(bench)], blocks, bench.sizes.block_size, dtype, bench.device, codec, tails)
        if any(start for start, _ in lengths):
            sequences.step(pool, features, past=True)
        out = sequences.step(pool, features, past=False)
        expected = torch.cat([_expected(pool.layers[0], sequences, i, features) for i in range(len(lengths))])
        error = (out.double() - expected).abs().max() / expected.abs().max()
        worst = max(worst, float(error.nan_to_num(torch.inf)))
        wrong += _wrong_bytes(pool.layers[0], sequences)
    ok = worst <= TOLERANCE[dtype] and wrong == 0
    return Line(case, worst, "of the largest", f"{wrong} bytes differ from the codec's" if wrong else "", ok)


def _expected(kv: LayerKV, sequences: Sequences, i: int, features: Features) -> Tensor:
    """[tokens, heads, dim] in float64."""
    (start, tokens), table = sequences.lengths[i], torch.tensor(sequences.tables[i], device=sequences.query[0].device)
    end, size = start + tokens, kv.views["values"].shape[1]
    share = sequences.query[i].shape[0] // kv.shape.kv_heads
    query = sequences.query[i][:, start:].double() * features.scale

    def heads(read: Tensor) -> Tensor:
        return read.flatten(0, 1)[:end].double().transpose(0, 1).repeat_interleave(share, 0)

    values = heads(kv.codec.read_values(kv.views, table, kv.shape, torch.float32))
    scores = query @ heads(kv.codec.read_keys(kv.views, table, kv.shape, torch.float32)).transpose(1, 2)
    q, k = torch.arange(start, end, device=query.device)[:, None], torch.arange(end, device=query.device)
    if isinstance(kv.codec, PerBlock):  # a query sees the keys of its own block raw
        raw = query @ sequences.key[i].double().repeat_interleave(share, 0).transpose(1, 2)
        scores = torch.where(k // size == q // size, raw, scores)
    if features.softcap is not None:
        scores = torch.tanh(scores / features.softcap) * features.softcap
    seen = (k <= q) & ((k > q - features.window) if features.window else True)
    scores = scores.masked_fill(~seen, -torch.inf)
    if features.sinks is not None:
        sinks = features.sinks.double()[:, None, None].expand(-1, tokens, 1)
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., :end] @ values).transpose(0, 1)


def _wrong_bytes(kv: LayerKV, sequences: Sequences) -> int:
    """Bytes in full blocks that are not those which the codec's torch code writes."""
    wrong = 0
    for i, table in enumerate(sequences.tables):
        size, full = kv.views["values"].shape[1], len(sequences.key[i][0]) // kv.views["values"].shape[1]
        blocks = torch.tensor(table[:full], device=sequences.key[i].device, dtype=torch.int64)
        twin = {
            name: torch.zeros_like(view[:1]).repeat(full, *[1] * (view.ndim - 1)) for name, view in kv.views.items()
        }
        keys, values = (tensors[i].transpose(0, 1)[: full * size] for tensors in (sequences.key, sequences.value))
        at = torch.arange(full * size, device=blocks.device)
        kv.codec.write_values(twin, at // size, at % size, values)
        if isinstance(kv.codec, PerToken):
            kv.codec.write_keys(twin, at // size, at % size, keys)
        elif isinstance(kv.codec, PerBlock):
            kv.codec.seal_keys(twin, at[:full], keys.reshape(full, size, *keys.shape[1:]))
        for name, view in kv.views.items():
            ours = view.view(torch.uint8).index_select(0, blocks)
            wrong += int((ours != twin[name].view(torch.uint8)).sum())
    return wrong
