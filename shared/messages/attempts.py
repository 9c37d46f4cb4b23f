"""What is known of the attempts at a request, and of one that was given up."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.messages.base import MAX_SERVERS, Message, RequestId, Tenant, WorkerName
from shared.messages.requests import Generate

LAST_SECOND = 253_402_300_799.0
"""The end of the year 9999: no calendar goes further."""


class Attempt(Message):
    """A worker's note on one delivery of a request; the last one of an attempt counts."""

    type: Literal["attempt"] = "attempt"
    attempt: Annotated[int, Field(ge=1)]
    """The delivery, as in the request's events."""
    worker: WorkerName
    life: Annotated[str, Field(max_length=32)]
    """As in the worker's beat."""
    busy: bool
    """The request is being worked on. False: it waits for its turn, or was handed back."""


class DeadLetter(Message):
    """A request that was given up because of what became of those who tried it."""

    max_bytes = 2 * Generate.max_bytes

    type: Literal["dead"] = "dead"
    id: RequestId
    tenant: Tenant
    subject: Annotated[str, Field(max_length=1024)]
    """Where the request came in; tells its priority."""
    request: bytes
    """The message as it came in. Empty if it was too large to be kept."""
    code: str
    reason: str
    attempts: Annotated[int, Field(ge=0)]
    """So many came to nothing."""
    workers: Annotated[list[WorkerName], Field(max_length=MAX_SERVERS)]
    """Those that died at work on it, in order, as far as they are known."""
    at: Annotated[float, Field(ge=0, le=LAST_SECOND, allow_inf_nan=False)]
    """When it was given up, in seconds since 1970."""
