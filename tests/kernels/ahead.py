"""Compiles every launch of a step for GPUs that are not here, as it would be compiled there.

A program of its own (`python -m tests.kernels.ahead CASE ...`), because TRITON_INTERPRET, which other tests need, must
not be set. Prints one JSON object per kernel.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shared.engine.attention import Features
from shared.engine.codecs.base import LayerShape
from shared.engine.codecs.registry import CODECS
from shared.engine.pool import KVPool, Tails
from shared.engine.span import Span
from shared.kernels.attention import attention, tiling_for
from shared.kernels.call import Call
from shared.kernels.layer import seals
from shared.kernels.meta import StepMeta
from shared.kernels.seal import keep, seal
from shared.kernels.write import write

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), "cubin", 163 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), "cubin", 227 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "hsaco", 64 << 10),
}
"""Target, what it runs, and bytes of shared memory that a program may have there."""
QUERIES = {"decode": 1, "verify": 5, "prefill": 256}
FEATURES = {
    "plain": Features(0.1),
    "all": Features(0.1, window=1000, softcap=30.0, sinks=torch.zeros(8, dtype=torch.bfloat16)),
}
SHAPES = {f"{k}x{v}": LayerShape(2, k, v) for k, v in ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256))}
_SHARE, _CONTEXT, _BLOCK = 4, 8192, 16
_TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int8: "*i8",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


class Case(NamedTuple):
    """Names of what is above; written `codec:queries:features:shape:target`."""

    codec: str
    queries: str
    features: str
    shape: str
    target: str

    def __str__(self) -> str:
        return ":".join(self)


def every() -> list[Case]:
    """Every codec, feature, query length, head size and target, though not every combination: each takes seconds."""
    most = [
        (codec, queries, "all", shape, target)
        for codec, (queries, shape), target in itertools.product(
            CODECS, (("decode", "64x64"), ("prefill", "128x128")), TARGETS
        )
    ]
    shapes = itertools.product(("none", "int4"), ("decode", "prefill"), ("plain",), SHAPES, ("sm_90",))
    verifying = itertools.product(CODECS, ("verify",), ("plain",), ("128x128",), ("sm_80", "gfx942"))
    return sorted({Case(*case) for case in itertools.chain(most, shapes, verifying)})


def launches(case: Case) -> list[Call]:
    """Of a step on a pool of a few blocks: lengths and addresses are not compiled in."""
    codec, shape, count, dtype = CODECS[case.codec], SHAPES[case.shape], QUERIES[case.queries], torch.bfloat16
    tails = Tails.of(codec, 2, 4, _BLOCK)
    device = torch.device("cpu")
    kv = KVPool([shape] * 2, 2, _BLOCK, dtype, device, codec, tails).layers[0]
    span = Span((1,) * count, _CONTEXT - count, (0,) * (_CONTEXT // _BLOCK))
    meta = StepMeta.of([span, span], _BLOCK, device, tails.ring)
    heads = shape.kv_heads * _SHARE
    query, key, value, out = (
        torch.zeros(2 * count, n, dim, dtype=dtype)
        for n, dim in (
            (heads, shape.k_dim), (shape.kv_heads, shape.k_dim), (shape.kv_heads, shape.v_dim), (heads, shape.v_dim)
        )
    )  # fmt: skip
    tiling = tiling_for(kv, meta, heads, dtype.itemsize, hip=case.target.startswith("gfx"))
    attending = attention(kv, meta, query, key, FEATURES[case.features], tiling, out)
    sealing = [seal(kv, meta, key), keep(kv, meta, key)] if seals(kv) else []
    return [write(kv, meta, key, value), *sealing, *attending]


def compiled(call: Call, target: str) -> Any:
    """Triton's compiled kernel, with `.asm` and `.metadata`; arguments are specialised as its launcher does."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    assert set(call.arguments) | set(call.constants) == set(call.kernel.arg_names)
    for index, name in enumerate(call.kernel.arg_names):
        value = call.constants[name] if name in call.constants else call.arguments[name]
        if name in call.constants or (isinstance(value, int) and value == 1):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = _TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=call.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": call.warps, "num_stages": call.stages, **call.options}
    return triton.compile(source, target=TARGETS[target][0], options=options)


def report(case: Case) -> Iterator[dict[str, Any]]:
    for call in launches(case):
        kernel = compiled(call, case.target)
        _, binary, limit = TARGETS[case.target]
        code = len(kernel.asm[binary])
        yield {
            "case": str(case), "kernel": call.kernel.__name__, "code": code, "shared": kernel.metadata.shared,
            "limit": limit,
        }  # fmt: skip


if __name__ == "__main__":
    for text in sys.argv[1:]:
        for line in report(Case(*text.split(":"))):
            print(json.dumps(line), flush=True)
