"""Settings of a drafter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.config import Settings


class DrafterSettings(Settings):
    draft_source: Literal["auto", "model", "lookup"] = "auto"
    """`lookup` continues a repetition found in the sequence; `model` runs the draft model; `auto` combines them."""
    drafter_model: str = ""
    """Draft model (as `model`); empty: the target's own first `drafter_layers` layers."""
    drafter_layers: Annotated[int, Field(ge=1)] = 8
    lookup_min_match: Annotated[int, Field(ge=1)] = 2
    """Shortest repetition worth continuing, in tokens."""
    max_sessions: Annotated[int, Field(ge=1)] = 256
