"""Settings of a decode worker."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.config import Settings
from shared.messages import MAX_BATCH


class DecodeSettings(Settings):
    max_running: Annotated[int, Field(ge=1, le=MAX_BATCH)] = 32
    """Sequences in one decode step."""
    step_tokens: Annotated[int, Field(ge=1)] = 256
    """Token budget of one step: decodes and drafts first, the rest is prefill chunks."""
    mixed_tokens: Annotated[int, Field(ge=0)] = 0
    """Most tokens of prompts in a step in which answers go on, which wait for it; 0: 64 on a CPU, and on a GPU what
    `step_tokens` leaves."""
    local_prefill_tokens: Annotated[int, Field(ge=0)] = 128
    """A prompt with at most so many uncached tokens is prefilled here, not by a prefill worker."""
    prefill_patience_s: Annotated[float, Field(gt=0)] = 5.0
    """Without a new block for so long, the rest of the prompt is computed here. As long as the prefill worker that
    has the job gets anything done, by its beats, it is waited for longer: up to 8 times that."""
    draft_depth: Annotated[int, Field(ge=0, le=64)] = 8
    """Most tokens to draft per sequence and step; 0 turns speculation off."""
    draft_wait_ms: Annotated[float, Field(ge=0, le=60_000)] = 50.0
    """Longest time a step waits for drafts; it waits no longer than they are expected to save."""
    draft_adaptive: bool = True
    """Draft for each sequence as many tokens as pay. False: always `draft_depth`, and wait for them `draft_wait_ms`."""
    public_prefixes: str = ""
    """A JSON file of prompts, chat beginnings or token ids whose blocks all tenants share. The same for all workers."""
    affinity: bool = True
    """Whether a request goes to the decode worker whose pool holds its prefix, when that one has room."""
    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline of a request that sets none."""
