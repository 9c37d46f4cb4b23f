"""What clients hear, as it happens or told again."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from shared.messages.base import MAX_SERVERS, Message
from shared.sampling.fields import Logprob, TokenIds


class _Told(BaseModel):
    """Fields that a later version has are passed over: workers may be newer than their clients."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Usage(_Told):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV existed before this request, in the worker's pool or in the shared cache."""
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Timings(_Told):
    """Milliseconds, as the decode worker saw them."""

    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    """From taking the request to its first token."""
    tpot_ms: float = 0.0
    """Mean time per output token after the first."""
    total_ms: float = 0.0
    transfer_ms: float = 0.0
    """Of `ttft_ms`: fetching blocks of the prompt from the shared cache."""
    prefill_ms: float = 0.0
    """Of `ttft_ms`: waiting for a prefill worker, and computing the rest here. What is left, it waited for room."""


class ServedBy(_Told):
    decode: str = ""
    prefill: Annotated[list[str], Field(max_length=MAX_SERVERS)] = []
    drafter: Annotated[list[str], Field(max_length=MAX_SERVERS)] = []


class Event(Message):
    """Base of what a request's event subject carries.

    `attempt` counts deliveries of the request; of two events with one index the higher attempt counts.
    """

    id: str
    attempt: int = 1


class Tokens(Event):
    """Generated tokens; `index` is the position of the first of them in the completion.

    `text` is what these tokens add to the visible text; it may lag behind while a character or a possible
    stop string is incomplete.
    """

    type: Literal["tokens"] = "tokens"
    index: Annotated[int, Field(ge=0)]
    token_ids: TokenIds
    text: str = ""
    logprobs: list[Logprob] | None = None
    """One for each token, if the request asked for them."""

    @field_validator("logprobs")
    @classmethod
    def _one_each(cls, value: list[Logprob] | None, info: ValidationInfo) -> list[Logprob] | None:
        if value is not None and len(value) != len(info.data.get("token_ids", [])):
            raise ValueError("not one for each token")
        return value


class Finished(Event):
    type: Literal["finished"] = "finished"
    reason: Literal["stop", "length", "cancelled"]
    seed: int
    usage: Usage
    timings: Timings
    served_by: ServedBy


class Failed(Event):
    type: Literal["failed"] = "failed"
    code: str
    message: str
    field: str | None = None


class Again(Message):
    """A client that may not read the event stream asks for its events with sequence > `after`."""

    type: Literal["again"] = "again"
    after: Annotated[int, Field(ge=0)]


class MissedEvent(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    seq: Annotated[int, Field(ge=1)]
    request: Annotated[str, Field(max_length=32)]
    """Sequence of the request it answers, as in the event's header."""
    data: bytes


class Missed(Message):
    """The answer. `more`: ask again after the last of these."""

    max_bytes = 4 << 20

    type: Literal["missed"] = "missed"
    events: Annotated[list[MissedEvent], Field(max_length=1 << 20)]
    more: bool
