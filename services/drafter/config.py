"""Settings of a drafter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.config import Settings


class DrafterSettings(Settings):
    draft_source: Literal["auto", "model", "suffix"] = "auto"
    """`suffix` continues what occurred before, in the sequence or in past outputs of the same tenant; `model` runs the
    draft model; `auto` takes whichever promises more, and is `suffix` alone where no draft model is given: the first
    layers of a model that was not trained for it are right too seldom to pay for their steps."""
    drafter_model: str = ""
    """Draft model (as `model`); with source `model` and none given: the target's own first `drafter_layers` layers."""
    drafter_layers: Annotated[int, Field(ge=1)] = 8
    history_tokens: Annotated[int, Field(ge=0)] = 131_072
    """Tokens of past outputs that `suffix` keeps, over all tenants; about 250 bytes each. 0: none."""
    max_sessions: Annotated[int, Field(ge=1)] = 256

    @property
    def wants_model(self) -> bool:
        return self.draft_source == "model" or (self.draft_source == "auto" and bool(self.drafter_model))
