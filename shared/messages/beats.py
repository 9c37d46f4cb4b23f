"""Who is alive, and what two workers must have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.messages.base import MAX_COUNTERS, MAX_HIDDEN, MAX_NUMBER, Message, RequestId, WorkerName

MAX_QUEUES = 8


class Identity(BaseModel):
    """What two workers must have in common before one may use the other's blocks."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    fingerprint: str
    codec: str
    block_size: int
    block_bytes: int
    layers: Annotated[int, Field(ge=1)] = 1
    """Layers in a block, one after another."""

    def differences(self, other: Identity) -> list[str]:
        mine, theirs = self.model_dump(), other.model_dump()
        return [f"{k}: {mine[k]} here, {theirs[k]} there" for k in mine if mine[k] != theirs[k]]


Amount = Annotated[int, Field(ge=0, le=MAX_NUMBER)]


class Load(BaseModel):
    """How things stand with a worker now. Fields that a later version has are passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    running: Amount = 0
    waiting: Amount = 0
    free_blocks: Amount = 0
    blocks: Amount = 0
    """In the worker's pool; 0: it has none."""
    cached_blocks: Amount = 0
    """Those that have a name: a request that begins as they do finds them."""
    host_bytes: Amount = 0
    """That the processes of its machine share through memory."""
    stream_bytes: Amount = 0
    """Of the shared cache's stream."""
    queued: Annotated[dict[RequestId, Amount], Field(max_length=MAX_QUEUES)] = {}
    """By a queue's consumer: messages that nobody has taken yet. Left out of beats between which it was not looked."""


class Beat(Message):
    """Fields that a later version has are passed over: workers of two versions hear each other."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["beat"] = "beat"
    role: Literal["prefill", "decode", "drafter"]
    worker: WorkerName
    life: Annotated[str, Field(max_length=32)] = ""
    """Tells this process from others that have had the worker's name."""
    identity: Identity | None = None
    """None for a drafter: it shares tokens, never blocks."""
    vocabulary: str = ""
    """Digest of the tokenizer's vocabulary; drafts are only asked of a drafter with the same one."""
    hidden_size: Annotated[int, Field(ge=0, le=MAX_HIDDEN)] = 0
    """Of a drafter: it reads hidden states of the target of so many channels; 0: none."""
    draining: bool = False
    """Takes no work: no longer, or not yet."""
    joining: bool = False
    """Listens to the others before it serves."""
    load: Load = Load()
    counters: Annotated[dict[RequestId, int], Field(max_length=MAX_COUNTERS)] = {}
