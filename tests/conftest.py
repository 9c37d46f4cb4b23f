"""Fixtures for every test."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """nats-py needs asyncio, so `@pytest.mark.anyio` tests run on it alone."""
    return "asyncio"
