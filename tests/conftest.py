"""Fixtures for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import structlog

# Before torch is imported: a second thread only slows tiny models down, and waits for the first by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; read when Triton is first imported


def pytest_collection_finish() -> None:
    """What tests import stays: a full collection through it stops every fleet in this process for 0.4 s, more
    than some of their deadlines.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """nats-py needs asyncio, so `@pytest.mark.anyio` tests run on it alone."""
    return "asyncio"


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Whatever a test sets logging to (the CLI sets it too) ends with it."""
    before, configured = structlog.get_config(), structlog.is_configured()
    yield
    if configured:
        structlog.configure(**before)
    else:
        structlog.reset_defaults()
