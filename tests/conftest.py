"""Fixtures for every test."""

from __future__ import annotations

import os

import pytest

# Before torch is imported: a second thread only slows tiny models down, and waits for the first by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; read when Triton is first imported


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """nats-py needs asyncio, so `@pytest.mark.anyio` tests run on it alone."""
    return "asyncio"
