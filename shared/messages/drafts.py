"""Asking a drafter, and its answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.messages.base import (
    MAX_BATCH,
    MAX_DRAFT,
    MAX_HIDDEN,
    MAX_SALT,
    Message,
    RequestId,
    RequestKey,
    Sessions,
    WorkerName,
)
from shared.sampling.fields import Sampling, TokenIds


class DraftItem(BaseModel):
    """One sequence that wants drafts. The drafter is told the tokens after the `base` ones it has already."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    session: RequestKey
    base: Annotated[int, Field(ge=0)]
    token_ids: TokenIds
    k: Annotated[int, Field(ge=1, le=MAX_DRAFT)]
    sampling: Sampling
    prompt_len: Annotated[int, Field(ge=0)] = 0
    """So many tokens at the beginning are the prompt, which counts for some penalties and not for others."""
    salt: Annotated[str, Field(max_length=MAX_SALT)] = ""
    """The request's `cache_salt`: what one session brings, others of its tenant profit from only with the same salt."""
    hidden: Annotated[bytes, Field(max_length=2 * MAX_HIDDEN)] = b""
    """The target's hidden state at the position before the last token, float16 little-endian: what its LM head read
    when that token was chosen. Empty: not known, or not wanted."""


class DraftAsk(Message):
    max_bytes = 8 << 20

    type: Literal["draft_ask"] = "draft_ask"
    worker: WorkerName
    wait_ms: Annotated[float, Field(ge=0.1, le=60_000, allow_inf_nan=False)]
    """How long the asker will wait; drafts that would come later are not worth making."""
    items: Annotated[list[DraftItem], Field(max_length=MAX_BATCH)]
    ended: Sessions = []
    """Sessions that will not be asked about again."""


class Draft(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    session: RequestKey
    position: Annotated[int, Field(ge=0)]
    """Length of the sequence these tokens continue."""
    token_ids: Annotated[TokenIds, Field(max_length=MAX_DRAFT)]
    source: RequestId


class Drafts(Message):
    type: Literal["drafts"] = "drafts"
    worker: WorkerName
    drafts: Annotated[list[Draft], Field(max_length=MAX_BATCH)]
    unknown: Sessions = []
    """Sessions whose base the drafter does not have; send them from 0. One that was is not taken on: it is too long, or
    has ids that the drafter does not know, or there is no room."""
