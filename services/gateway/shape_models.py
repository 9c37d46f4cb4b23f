"""The shapes of answers, for the OpenAPI document: what `shapes` and `problems` make. Nothing is checked by these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Reason = Literal["stop", "length", "tool_calls"]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", title=None)


class ErrorDetail(_Shape):
    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
    param: Annotated[str | None, Field(description="The field to blame.")]
    code: str | None


class Error(_Shape):
    error: ErrorDetail


class PromptDetails(_Shape):
    cached_tokens: int


class CompletionDetails(_Shape):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageReport(_Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TokenLogprob(_Shape):
    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Shape):
    content: list[ChosenLogprob]
    refusal: None


class TextLogprobs(_Shape):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CalledFunction(_Shape):
    name: str
    arguments: Annotated[str, Field(description="An object in JSON.")]


class MessageCall(_Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(_Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[MessageCall] = []


class ChatChoice(_Shape):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason


class ChatCompletion(_Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReport


class FunctionDelta(_Shape):
    name: str = ""
    arguments: str


class CallDelta(_Shape):
    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class MessageDelta(_Shape):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    tool_calls: list[CallDelta] = []


class ChatChunkChoice(_Shape):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None


class ChatCompletionChunk(_Shape):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageReport | None = None


class TextChoice(_Shape):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason


class TextCompletion(_Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageReport


class TextChunkChoice(_Shape):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason | None


class TextCompletionChunk(_Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: UsageReport | None = None


class Model(_Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(_Shape):
    object: Literal["list"]
    data: list[Model]


class Health(_Shape):
    status: Literal["ok"]


class Ready(_Shape):
    status: Literal["ready"]
    models: list[str]


class NotReady(_Shape):
    status: Literal["not ready"]
    reason: str


SHAPES: tuple[type[BaseModel], ...] = (
    Error, ChatCompletion, ChatCompletionChunk, TextCompletion, TextCompletionChunk, Model, Models, Health, Ready,
    NotReady,
)  # fmt: skip


def components() -> dict[str, Any]:
    """JSON schemas of them all, by name."""
    from pydantic.json_schema import models_json_schema

    _, found = models_json_schema(
        [(shape, "validation") for shape in SHAPES], ref_template="#/components/schemas/{model}"
    )
    return dict(found["$defs"])
