"""How near paged attention, writing and sampling come to the device's own copy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.bench import Bench, tables
from benchmarks.gpu.report import Line
from shared.engine.attention import Features
from shared.engine.codecs.base import LayerShape
from shared.engine.codecs.registry import CODECS, codec_of
from shared.engine.pool import KVPool, Tails
from shared.engine.span import Span
from shared.kernels.attention import attention, tiling_for
from shared.kernels.call import Call
from shared.kernels.layer import seals
from shared.kernels.meta import StepMeta
from shared.kernels.seal import seal
from shared.kernels.write import write
from shared.messages import Sampling
from shared.sampling.device import choose
from shared.sampling.params import Row
from shared.sampling.sampler import sample

DTYPE = torch.bfloat16
GB = 1e9


def copy(bench: Bench) -> Iterator[Line]:
    source = torch.ones(bench.sizes.copy_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    bench.copy_rate = 2 * source.nbytes / bench.device_time(lambda: target.copy_(source))
    yield Line(f"{source.nbytes >> 20} MiB", bench.copy_rate / GB, "GB/s", "read and written")


def attending(bench: Bench) -> Iterator[Line]:
    for batch, context in bench.sizes.attention:
        for split in (True, False):
            yield _attention(bench, "none", batch, context, split)
    for name in CODECS:
        if name != "none":
            yield _attention(bench, name, *bench.sizes.codec_attention, split=True)


def writing(bench: Bench) -> Iterator[Line]:
    s, tokens = bench.sizes, bench.sizes.write_tokens
    blocks = tokens // s.block_size
    for name in CODECS:
        pool = _pool(bench, name, blocks, 1)
        layer = pool.layers[0]
        meta = StepMeta.of([Span((0,) * tokens, 0, tuple(range(blocks)))], s.block_size, bench.device, pool.tails.ring)
        key, value = (bench.randn(tokens, s.kv_heads, s.dim, dtype=DTYPE) for _ in range(2))
        calls = [write(layer, meta, key, value), *([seal(layer, meta, key)] if seals(layer) else [])]
        seconds = bench.device_time(partial(_launch, calls))
        size = key.nbytes + value.nbytes + blocks * pool.block_bytes
        yield _rate(bench, f"{name}, {tokens} tokens", size, seconds)


def sampling(bench: Bench) -> Iterator[Line]:
    s = bench.sizes
    kinds = {
        "plain": Sampling(temperature=0.8),
        "top-k 50, top-p 0.9": Sampling(temperature=0.8, top_k=50, top_p=0.9),
        "min-p 0.05": Sampling(temperature=0.8, min_p=0.05),
    }
    for name, kind in kinds.items():
        for batch in s.sampling:
            logits = bench.randn(batch, s.vocab) * 3
            rows = [Row(kind, 2**63 + i, 1000 + i) for i in range(batch)]
            tokens = choose(logits, rows).tolist()
            seconds = bench.wall(lambda: choose(logits, rows).tolist())  # noqa: B023
            same = sum(a == b for a, b in zip(tokens, sample(logits.cpu(), rows), strict=True))
            note = f"{same} of {batch} tokens as on the CPU"
            yield Line(f"{name}, batch {batch}", seconds / batch * 1e6, "us/row", note, same == batch)


def _pool(bench: Bench, name: str, blocks: int, slots: int) -> KVPool:
    """Of one layer, with numbers in it: what is zero might be cheaper to read."""
    s, codec = bench.sizes, codec_of(name)
    tails = Tails.of(codec, slots, 0, s.block_size)
    shape = LayerShape(s.kv_heads, s.dim, s.dim)
    pool = KVPool([shape], blocks, s.block_size, DTYPE, bench.device, codec, tails)
    for view in pool.layers[0].views.values():
        if view.dtype in (DTYPE, torch.float16, torch.float32):
            view.normal_(generator=bench.generator)
        else:
            view.view(torch.uint8).random_(0, 120, generator=bench.generator)
    return pool


def _attention(bench: Bench, name: str, batch: int, context: int, split: bool) -> Line:
    """One decode step's attention of one layer. Small ones go over several sets of sequences, lest caches hold them."""
    s = bench.sizes
    per_token = _pool(bench, name, 1, 1).block_bytes / s.block_size
    sets = max(1, math.ceil(s.attention_bytes / (batch * context * per_token)))
    pool = _pool(bench, name, sets * batch * context // s.block_size, batch)
    layer = pool.layers[0]
    where = tables([(context - 1, 1)] * batch * sets, s.block_size)
    metas = [
        StepMeta.of(
            [Span((0,), context - 1, table, slot=i) for i, table in enumerate(where[n * batch : (n + 1) * batch])],
            s.block_size, bench.device, pool.tails.ring,
        )
        for n in range(sets)
    ]  # fmt: skip
    query, key = bench.randn(batch, s.heads, s.dim, dtype=DTYPE), bench.randn(batch, s.kv_heads, s.dim, dtype=DTYPE)
    out, features = torch.zeros_like(query), Features(s.dim**-0.5)
    tile = tiling_for(layer, metas[0], s.heads, DTYPE.itemsize, hip=torch.version.hip is not None)
    if not split:
        tile = replace(tile, splits=1)

    def work() -> None:
        for meta in metas:
            _launch(attention(layer, meta, query, key, features, tile, out))

    seconds = bench.device_time(work) / sets
    case = f"{name}, batch {batch}, context {context}, {tile.splits} splits"
    line = _rate(bench, case, batch * context * per_token, seconds)
    bench.free()
    return line


def _launch(calls: Sequence[Call]) -> None:
    for call in calls:
        call.run()


def _rate(bench: Bench, case: str, size: float, seconds: float) -> Line:
    note = f"{seconds * 1e6:.0f} us"
    if bench.copy_rate:
        note += f", {size / seconds / bench.copy_rate:.0%} of a copy"
    return Line(case, size / seconds / GB, "GB/s", note)
