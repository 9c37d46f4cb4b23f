"""What all checks share: the device, the sizes and the clock."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shared.engine.engine import MakeRunner
from shared.engine.graphs import TritonRunner


@dataclass(frozen=True, slots=True)
class Sizes:
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 16
    ragged: tuple[tuple[int, int], ...] = ((0, 300), (37, 1), (511, 1), (1000, 5), (2047, 17), (63, 130))
    """(start, tokens) of the sequences that kernels are checked on: a step that prefills, verifies and decodes."""
    decoding: tuple[tuple[int, int], ...] = ((0, 1), (37, 1), (511, 3), (2047, 1), (9000, 2), (12, 5))
    """Short ones, whose contexts are split over programs."""
    window: int = 200
    huge_elements: int = 2**31
    copy_bytes: int = 2 << 30
    attention: tuple[tuple[int, int], ...] = ((1, 8192), (1, 32768), (16, 8192), (16, 32768), (64, 8192), (64, 32768))
    """(batch, context)"""
    attention_bytes: int = 256 << 20
    """KV that one measurement reads at least: more than caches hold."""
    codec_attention: tuple[int, int] = (16, 32768)
    write_tokens: int = 32768
    vocab: int = 128256
    sampling: tuple[int, ...] = (1, 16, 64)
    batches: tuple[int, ...] = (1, 16, 64)
    context: int = 1024
    steps: int = 24
    codec_context: int = 4096
    prefill: int = 4096
    model: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 16384,
        }
    )  # fmt: skip


DRY = Sizes(
    heads=2, kv_heads=1, dim=16, block_size=4, ragged=((0, 6), (3, 1)), decoding=((6, 1), (4, 2)), window=4,
    huge_elements=0, copy_bytes=1 << 20, attention=((1, 16), (2, 16)), attention_bytes=0, codec_attention=(1, 16),
    write_tokens=8, vocab=1500, sampling=(1, 2), batches=(1, 2), context=8, steps=1, codec_context=8, prefill=8,
    model={
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 64, "vocab_size": 512, "max_position_embeddings": 256,
    },
)  # fmt: skip
"""The same checks in Triton's interpreter, which takes tens of milliseconds per program."""


class Bench:
    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.cuda = device.type == "cuda"
        self.generator = torch.Generator(device).manual_seed(0)
        self.copy_rate = 0.0
        """Bytes per second that a copy on the device reads and writes, once measured."""

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=torch.float32).to(dtype)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def runner(self, graphs: bool) -> MakeRunner:
        return partial(TritonRunner, graphs=graphs and self.cuda)

    def wall(self, work: Callable[[], object], repeat: int = 5) -> float:
        """Seconds, host and device together: the median after one run to warm up."""
        if not self.cuda:
            repeat = 1
        else:
            work()
        times = []
        for _ in range(repeat):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def device_time(self, work: Callable[[], object], repeat: int = 10) -> float:
        """Seconds on the device alone: `work` is captured and replayed, so that launching it costs nothing."""
        if not self.cuda:
            return self.wall(work)
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        self.wait()
        return statistics.median(float(a.elapsed_time(b)) for a, b in itertools.pairwise(events)) / 1000

    def free(self) -> None:
        if self.cuda:
            torch.cuda.empty_cache()


def tables(spans: Any, block_size: int, first: int = 0, seed: int = 0) -> list[tuple[int, ...]]:
    """Block tables for (start, tokens) sequences, scattered over the ids from `first` up."""
    counts = [-(-(start + tokens) // block_size) for start, tokens in spans]
    ids = iter((torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + first).tolist())
    return [tuple(next(ids) for _ in range(count)) for count in counts]
