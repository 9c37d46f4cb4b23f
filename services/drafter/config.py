"""Settings of a drafter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.config import Settings


class DrafterSettings(Settings):
    draft_source: Literal["auto", "model", "suffix"] = "auto"
    """The source "suffix" continues what occurred before, in the sequence or in past outputs of the same tenant; with
    "model" the draft model runs; "auto" takes whichever promises more. Where no draft model is given and none comes
    with Trine for the target, "auto" is "suffix" alone: the first layers of a model that was not trained for it are
    right too seldom."""
    drafter_model: str = ""
    """The folder of a draft head, or a whole model (with source "model"), or "shipped": the draft head that comes with
    Trine for the target. When empty that one too, if there is one; if not, with source "model", the target's own first
    `drafter_layers` layers. See docs/checking-a-drafter.md."""
    drafter_layers: Annotated[int, Field(ge=1)] = 8
    """Where the target's own first layers draft: how many of them."""
    history_tokens: Annotated[int, Field(ge=0)] = 131_072
    """Tokens of past outputs that "suffix" keeps, over all tenants; about 250 bytes each. 0: none."""
    session_tokens: Annotated[int, Field(ge=1)] = 2_097_152
    """Tokens of all sequences drafted for at a time, about 40 bytes each; a sequence counts for 64 more than it has.
    New ones beyond that get no drafts until others end or have not been asked about for some seconds."""
