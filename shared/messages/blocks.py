"""Who computes, holds, hands over and drops what the prefix cache shares."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from shared.messages.base import (
    CLAIM_NAME,
    MAX_CLAIMED,
    MAX_ENDED,
    MAX_HELD,
    MAX_ID,
    MAX_SALT,
    Message,
    RequestId,
    RequestKey,
    Tenant,
    WorkerName,
)
from shared.messages.requests import Generate
from shared.sampling.fields import TokenIds


class PrefillJob(Message):
    """Compute the KV of these tokens (a whole number of blocks) and publish the blocks."""

    max_bytes = 8 << 20

    type: Literal["prefill"] = "prefill"
    request: RequestKey
    tenant: Tenant
    salt: Annotated[str, Field(max_length=MAX_SALT)] = ""
    public_blocks: Annotated[int, Field(ge=0)] = 0
    """So many blocks at the beginning are everybody's."""
    fingerprint: RequestId
    token_ids: TokenIds
    budget_ms: Annotated[int, Field(ge=1)]


class HeldBlocks(Message):
    """What a decode worker's pool holds; see `shared.cache.summary`. Beats do without: most who hear them need none."""

    type: Literal["held"] = "held"
    worker: WorkerName
    rate: Annotated[int, Field(ge=0, le=32)]
    """One name in 2**rate is listed."""
    names: Annotated[bytes, Field(max_length=8 * MAX_HELD)]


class Handover(Message):
    """A decode worker offers a request that it has pulled to one that holds the prompt's prefix."""

    max_bytes = 2 * Generate.max_bytes

    type: Literal["handover"] = "handover"
    worker: WorkerName
    handle: Annotated[str, Field(max_length=1024)]
    """What acks the request in the queue."""
    subject: Annotated[str, Field(max_length=1024)]
    """Where the request came in; tells priority and tenant."""
    request: bytes


class HandoverReply(Message):
    type: Literal["handover_reply"] = "handover_reply"
    taken: bool


class Drop(Message):
    """An operator's order to forget cached blocks: those of a scope (see `naming.Lineage`), or all."""

    type: Literal["drop"] = "drop"
    scope: Annotated[str, Field(min_length=1, max_length=MAX_ID)] | None = None


class Dropped(Message):
    """A worker has done so."""

    type: Literal["dropped"] = "dropped"
    worker: WorkerName
    pool_blocks: int
    """Blocks that its pool held under a name. Neither pool nor host tier know scopes apart: all are forgotten."""
    host_blocks: int
    """Blocks that it removed from the host tier."""


class Claim(Message):
    """An entry of the claim log: whose claims have ended, and which blocks this worker is about to compute.

    The number that the log gives it names the claim. See `shared.flights`.
    """

    max_bytes = 512 << 10

    type: Literal["claim"] = "claim"
    worker: WorkerName
    ended: Annotated[list[Annotated[int, Field(ge=1, le=2**63 - 1)]], Field(max_length=MAX_ENDED)] = []
    """Claims that hold no longer: this worker's own, or those of one that is dead or does not get on."""
    names: Annotated[bytes, Field(max_length=MAX_CLAIMED * CLAIM_NAME)] = b""
    """The first `CLAIM_NAME` bytes of the name of each block, in order, one after the other."""

    @field_validator("names")
    @classmethod
    def _whole_names(cls, value: bytes) -> bytes:
        if len(value) % CLAIM_NAME:
            raise ValueError(f"not a whole number of names of {CLAIM_NAME} bytes")
        return value
