"""Settings of a drafter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.config import Settings


class DrafterSettings(Settings):
    draft_source: Literal["auto", "model", "suffix"] = "auto"
    """`suffix` continues what occurred before, in the sequence or in past outputs of the same tenant; `model` runs the
    draft model; `auto` takes whichever promises more."""
    drafter_model: str = ""
    """Draft model (as `model`); empty: the target's own first `drafter_layers` layers."""
    drafter_layers: Annotated[int, Field(ge=1)] = 8
    history_tokens: Annotated[int, Field(ge=0)] = 131_072
    """Tokens of past outputs that `suffix` keeps, over all tenants; about 250 bytes each. 0: none."""
    max_sessions: Annotated[int, Field(ge=1)] = 256
