"""Trine: LLM serving as prefill, decode and drafter actors on NATS, with a shared prefix cache.

from trine import Client

async with Client() as client:
    completion = await client.generate("What is the capital of France?")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trine.client import Client
    from trine.completion import Completion
    from trine.merge import Delta
    from trine.stream import Stream

__all__ = ["Client", "Completion", "Delta", "Stream"]

_HOMES = {"Client": "client", "Completion": "completion", "Delta": "merge", "Stream": "stream"}


def __getattr__(name: str) -> Any:
    """Names are imported on first use, so that `import trine` (and every command of the CLI) starts fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trine' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"trine.{_HOMES[name]}"), name)
