"""What a plan has to know of the machine that runs a worker: memory, bandwidth, arithmetic. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from shared.errors import InvalidField


@dataclass(frozen=True, slots=True)
class Hardware:
    """`bandwidth` in bytes per second, `flops` dense in the model's dtype per second, `memory` in bytes.

    `reach`: the shares of the two that a worker gets in practice. `floor_s`: what a step takes in any case.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    source: str
    reads: float = 0.7
    computes: float = 0.5
    floor_s: float = 0.002
    codec_reads: tuple[tuple[str, float], ...] = ()
    """By codec: attention's time over that without one. Where it is not said, by bytes."""
    overlaps: bool = True
    """Reading goes on while it computes: the slower of the two counts, and not their sum."""
    bend: float = 0.0
    """Reading takes this share longer for more than one position: another kernel does it."""

    @property
    def on_cpu(self) -> bool:
        return bool(self.codec_reads)

    @property
    def number_bytes(self) -> int:
        """Of a number as models are run there: fp32 on a CPU, 16 bits on a GPU."""
        return 4 if self.on_cpu else 2

    def read_s(self, weights: float) -> float:
        return weights / (self.bandwidth * self.reads)

    def compute_s(self, operations: float) -> float:
        return operations / (self.flops * self.computes)

    def kv_weight(self, codec: str, bytes_: float, plain: float) -> float:
        """Bytes that reading KV of `bytes_` in this codec costs as much as; `plain`: of the same without a codec."""
        return plain * dict(self.codec_reads)[codec] if self.codec_reads else bytes_


_CPU = (("none", 1.0), ("int8", 1.4), ("fp8_e4m3", 5.0), ("int4", 2.4))
"""Measured on a CPU with AVX-512: gather and dequantise, over gathering floats."""
_CPU_FLOOR_S, _CPU_BEND = 0.006, 0.2
"""Steps of one, two and three positions took 52, 64 and 69 ms (docs/decisions/0004-the-drafter.md)."""


def _gpu(name: str, gigabytes: float, gb_per_s: float, teraflops: float, source: str) -> Hardware:
    return Hardware(name, gigabytes * 1e9, gb_per_s * 1e9, teraflops * 1e12, source)


HARDWARE = {
    card.name.lower(): card
    for card in (
        _gpu("T4", 16, 300, 65, "NVIDIA T4 datasheet: 16 GB, 300 GB/s, 65 TFLOPS fp16"),
        _gpu(
            "L4", 24, 300, 121, "NVIDIA L4 datasheet: 24 GB, 300 GB/s, 242 TFLOPS fp16 with sparsity, half of it dense"
        ),
        _gpu("A10", 24, 600, 125, "NVIDIA A10 datasheet: 24 GB, 600 GB/s, 125 TFLOPS bf16"),
        _gpu("L40S", 48, 864, 362, "NVIDIA L40S datasheet: 48 GB, 864 GB/s, 362 TFLOPS bf16 dense"),
        _gpu("A100", 80, 2039, 312, "NVIDIA A100 80GB SXM datasheet: 2,039 GB/s, 312 TFLOPS bf16"),
        _gpu(
            "H100", 80, 3350, 989, "NVIDIA H100 SXM datasheet: 3.35 TB/s, 1,979 TFLOPS bf16 with sparsity, half dense"
        ),
        _gpu("H200", 141, 4800, 989, "NVIDIA H200 SXM datasheet: 141 GB, 4.8 TB/s, 1,979 TFLOPS bf16 with sparsity"),
        _gpu("MI300X", 192, 5300, 1307, "AMD Instinct MI300X datasheet: 192 GB, 5.3 TB/s, 1,307 TFLOPS bf16"),
    )
}


def given(memory_gb: float, gb_per_s: float, teraflops: float, *, cpu: bool = False) -> Hardware:
    """From somebody's numbers."""
    name = "CPU as given" if cpu else "GPU as given"
    numbers = (memory_gb * 1e9, gb_per_s * 1e9, teraflops * 1e12)
    if cpu:
        return Hardware(name, *numbers, "given", 1.0, 1.0, _CPU_FLOOR_S, _CPU, False, _CPU_BEND)
    return Hardware(name, *numbers, "given")


def named(name: str) -> Hardware:
    """Raises InvalidField for one that is not in the table."""
    if name.lower() not in HARDWARE:
        known = ", ".join(card.name for card in HARDWARE.values())
        raise InvalidField(f"--hardware: {name:.40} is not known; there are {known}, and cpu", field="hardware")
    return HARDWARE[name.lower()]


def measured_cpu() -> Hardware:
    """A core of this machine, which is what a worker has: how fast numpy multiplies, and reads what no cache holds, in
    seconds of CPU, so that neighbours count for little. fp32."""
    import numpy as np

    left = np.full((1024, 1024), 0.5, dtype=np.float32)
    wide = np.full((256 << 20) // 4, 0.5, dtype=np.float32)
    operations = 2.0 * 1024**3
    flops = operations / _best_s(lambda: left @ left)
    bandwidth = wide.nbytes / _best_s(lambda: wide.reshape(-1, 4096) @ left.reshape(-1)[:4096])
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / (os.cpu_count() or 1)
    source = "measured just now with numpy in fp32, and a core's share of the memory"
    # What was measured is what a worker reaches, except that a step is more than its products.
    return Hardware(
        "a core of this CPU", memory, bandwidth, flops, source, 0.8, 0.8, _CPU_FLOOR_S, _CPU, False, _CPU_BEND
    )


def _best_s(call: Callable[[], object]) -> float:
    """CPU seconds of the fastest of several: others on the machine only add."""
    times = []
    for _ in range(12):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return max(min(times), 1e-9)
