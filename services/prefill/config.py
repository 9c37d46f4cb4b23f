"""Settings of a prefill worker."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.config import Settings


class PrefillSettings(Settings):
    chunk_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens of one forward pass, shared by the jobs that are running."""
    max_jobs: Annotated[int, Field(ge=1)] = 8
    """Jobs taken from the queue at once."""
