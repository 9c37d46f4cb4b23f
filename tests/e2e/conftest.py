"""Fixtures that are too costly to make more than once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.config import DEFAULT_MODEL
from shared.engine.engine import Engine
from shared.engine.weights import resolve
from shared.tokenizer import Tokenizer
from tests.e2e.gold import Gold
from trine.prepare import prepare
from trine.supervisor import Fleet


@pytest.fixture(scope="session")
def smollm2_engine() -> Engine:
    """The default model over a pool of 256 blocks of 16 tokens. Tests may overwrite any block."""
    return Engine.load(resolve(DEFAULT_MODEL), block_size=16, kv_blocks=256)


@pytest.fixture(scope="session")
def stack() -> Iterator[Fleet]:
    """A running fleet with the default model's real weights: 1 prefill, 2 decode, 1 drafter, a gateway, a nats-server.

    `stack.url` and `stack.model` are what a `Client` needs. Leave it as you found it: killed workers must be back.
    """
    counts = {"prefill": 1, "decode": 2, "drafter": 1, "gateway": 1}
    fleet = Fleet(counts, role_env={"gateway": {"TRINE_PORT": "0"}})
    prepare(fleet.settings.model)
    with fleet:
        fleet.wait_ready(180)
        yield fleet


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve(DEFAULT_MODEL))


@pytest.fixture(scope="session")
def gold() -> Gold:
    """The default model as plain `transformers` runs it."""
    return Gold(resolve(DEFAULT_MODEL))
