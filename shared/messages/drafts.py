"""Asking a drafter, and its answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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

Chance = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]


class DraftItem(BaseModel):
    """One sequence that wants drafts. The drafter is told the tokens after the `base` ones it has already."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    session: RequestKey
    base: Annotated[int, Field(ge=0)]
    token_ids: TokenIds
    k: Annotated[int, Field(ge=1, le=MAX_DRAFT)]
    """Tokens that are worth waiting for, on average."""
    more: Annotated[int, Field(ge=0, le=MAX_DRAFT)] = 0
    """So many beyond them are welcome where the drafter can tell that these are worth it (see `DraftAsk.least`)."""
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
    least: Chance = 0.1
    """A draft is not worth checking at present if it is less likely than this that it and those before it are right."""
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
    chances: Annotated[list[Chance], Field(max_length=MAX_DRAFT)] = []
    """Of each token to be the one that the target takes, if it takes those before; empty: the drafter does not say."""

    @model_validator(mode="after")
    def _one_for_each(self) -> Draft:
        if self.chances and len(self.chances) != len(self.token_ids):
            raise ValueError("chances must be as many as token_ids")
        return self


class Drafts(Message):
    type: Literal["drafts"] = "drafts"
    worker: WorkerName
    drafts: Annotated[list[Draft], Field(max_length=MAX_BATCH)]
    unknown: Sessions = []
    """Sessions whose base the drafter does not have; send them from 0. One that was is not taken on: it is too long, or
    has ids that the drafter does not know, or there is no room."""
