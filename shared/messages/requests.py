"""What clients ask for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from shared.messages.base import DEFAULT_MAX_TOKENS, MAX_NUMBER, MAX_STOP_CHARS, MAX_STOPS, Message, RequestId, Salt
from shared.messages.guided import Guided
from shared.messages.tools import MAX_CALLS, MAX_TOOLS, CallId, Tool, ToolCall, ToolName
from shared.sampling.fields import MAX_TOP_LOGPROBS, LogitBias, Sampling

MAX_RETRY_MS = 600_000


class ChatMessage(BaseModel):
    """`content` may be missing where an assistant only called tools. A `tool` message has the result of such a call."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    role: Literal["system", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    name: ToolName | None = None
    """Of the tool whose result it is."""
    content: Annotated[str | None, Field(validate_default=True)] = None

    @field_validator("tool_calls", "tool_call_id", "name")
    @classmethod
    def _of_its_role(cls, value: Any, info: ValidationInfo) -> Any:
        role = "assistant" if info.field_name == "tool_calls" else "tool"
        if value is not None and info.data.get("role", role) != role:
            raise ValueError(f"only messages of role {role} have it")
        return value

    @field_validator("content")
    @classmethod
    def _says_something(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("tool_calls") is None:
            raise ValueError("a text; only beside tool_calls it may be missing")
        return value


_SAMPLING = tuple(Sampling.model_fields)


class Generate(Message):
    """A client's request. Exactly one of `prompt` (raw text), `messages` (chat), `token_ids`."""

    max_bytes = 4 << 20

    type: Literal["generate"] = "generate"
    id: RequestId
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    token_ids: list[int] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    """What the model's chat template tells it of. Needs `messages`."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    logit_bias: LogitBias | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_NUMBER)] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    """Send the log-probability of each token with it."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """And those of so many of the most likely tokens in its place. Needs `logprobs`."""
    guided: Guided | None = None
    """What form the answer must have."""
    cache_salt: Salt | None = None
    """Cached KV is shared only with requests of the same tenant that have the same salt."""
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_NUMBER)] | None = None
    """Give up this long after the request was queued; the worker's default when unset."""

    @field_validator("tools")
    @classmethod
    def _of_a_chat(cls, value: list[Tool] | None, info: ValidationInfo) -> list[Tool] | None:
        if value is not None and info.data.get("messages", value) is None:
            raise ValueError("only with messages")
        return value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings")
        if any(not 0 < len(s) <= MAX_STOP_CHARS for s in stops):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
        return value

    @field_validator("min_tokens")
    @classmethod
    def _within_max_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        most = info.data.get("max_tokens") or DEFAULT_MAX_TOKENS
        if value is not None and value > most:
            raise ValueError(f"at most {most} tokens are generated; raise max_tokens")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _asked_for(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return value

    @model_validator(mode="after")
    def _one_prompt(self) -> Generate:
        given = [n for n in ("prompt", "messages", "token_ids") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of prompt, messages, token_ids, not {' and '.join(given)}")
        self.sampling  # noqa: B018 - validates the sampling fields with their own bounds
        return self

    @property
    def sampling(self) -> Sampling:
        return Sampling(**{n: v for n in _SAMPLING if (v := getattr(self, n)) is not None})

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Room(Message):
    """Told to a client that found the queue full."""

    type: Literal["room"] = "room"
    queued: Annotated[int, Field(ge=0, le=MAX_NUMBER)]
    """Requests in the queue: those that wait and those that are being answered."""
    capacity: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    retry_ms: Annotated[int, Field(ge=0, le=MAX_RETRY_MS)]
    """There may be room after so long, for this one client."""
