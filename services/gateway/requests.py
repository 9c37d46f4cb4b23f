"""Bodies of `/v1/chat/completions` and `/v1/completions`, and what they ask of the fleet. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from services.gateway import guided, messages
from services.gateway.fields import refuse_unsupported
from services.gateway.guided import Form, form_of
from services.gateway.tools import CHOICE_SCHEMA, Toolbox, toolbox
from services.gateway.tools import SCHEMA as TOOLS_SCHEMA
from shared.codec import reason
from shared.errors import EmptyPrompt, InvalidField
from shared.messages import DEFAULT_MAX_TOKENS, MAX_STOP_CHARS, MAX_STOPS, Salt
from shared.sampling.fields import MAX_TOP_LOGPROBS, LogitBias, Penalty

MAX_INT = 2**31 - 1
Tokens = Annotated[int, Field(ge=1, le=MAX_INT)]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
_IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT}}
_OPTIONS: dict[str, Any] = {
    "type": "object",
    "properties": {"include_usage": {"type": "boolean"}, "include_obfuscation": {"type": "boolean"}},
    "additionalProperties": False,
}
_STOP_TEXT: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOP: dict[str, Any] = {"anyOf": [_STOP_TEXT, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP_TEXT}]}
_PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        _IDS,
        {"type": "array", "minItems": 1, "items": _IDS},
    ]
}


class Kind(Enum):
    CHAT = "chatcmpl"
    TEXT = "cmpl"


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer: `fields` are the arguments of `Client.stream`; `prompt` says which of the body's prompts it is of."""

    prompt: int
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """What an HTTP request asks for."""

    kind: Kind
    model: str
    choices: tuple[Choice, ...]
    stream: bool = False
    include_usage: bool = False
    tools: tuple[str, ...] = ()
    """Names of the tools that may be called: calls are looked for in the text."""
    form: str = "guided"
    """The field that asked for the answer's form."""


class Body(BaseModel):
    """What both have in common. Bounds that are not here are those of `shared.messages.Generate`."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, hide_input_in_errors=True)

    model: Annotated[str, Field(description="One of /v1/models.")]
    stream: bool = False
    stream_options: Annotated[Any, WithJsonSchema(_OPTIONS)] = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Tokens | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT, description="-1 and 0: all.")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[str | list[str] | None, WithJsonSchema(_STOP)] = None
    logit_bias: LogitBias | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    cache_salt: Salt | None = None
    priority: Literal["high", "normal", "low"] | Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] = "normal"
    """A number as in vLLM: below 0 is high, above 0 low."""
    ignore_eos: bool = False
    response_format: Annotated[Any, WithJsonSchema(guided.FORMAT)] = None
    structured_outputs: Annotated[Any, WithJsonSchema(guided.STRUCTURED)] = None
    guided_json: Annotated[Any, WithJsonSchema(guided.SCHEMAS["guided_json"])] = None
    guided_regex: Annotated[Any, WithJsonSchema(guided.SCHEMAS["guided_regex"])] = None
    guided_choice: Annotated[Any, WithJsonSchema(guided.SCHEMAS["guided_choice"])] = None
    guided_grammar: Annotated[Any, WithJsonSchema(guided.SCHEMAS["guided_grammar"])] = None


class ChatBody(Body):
    messages: Annotated[Any, WithJsonSchema(messages.SCHEMA)]
    tools: Annotated[Any, WithJsonSchema(TOOLS_SCHEMA)] = None
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool = True
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class TextBody(Body):
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    logprobs: Annotated[TopLogprobs | None, Field(description="How many of the likeliest tokens to list.")] = None
    best_of: Annotated[int, Field(ge=1, le=128, description="The same as n.")] | None = None


B = TypeVar("B", bound=Body)
_AS_THEY_ARE = (
    "temperature",
    "top_p",
    "min_p",
    "min_tokens",
    "logit_bias",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "cache_salt",
)


def chat_call(given: Mapping[str, Any], *, max_messages: int, max_choices: int) -> Call:
    """Raises InvalidField or EmptyPrompt, naming the field. `null` is the same as unset."""
    body = _parsed(ChatBody, given)
    limit, limits = body.max_tokens, {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidField("max_completion_tokens: max_tokens says otherwise; give one", field="max_completion_tokens")
    limit = next(iter(limits), None)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidField("top_logprobs: needs logprobs: true", field="top_logprobs")
    prompt = {"messages": messages.chat_messages(body.messages, max_messages)}
    logprobs = {"logprobs": True, "top_logprobs": body.top_logprobs or 0} if body.logprobs else {}
    tools = toolbox(body.tools, body.tool_choice, body.parallel_tool_calls)
    return _call(Kind.CHAT, body, [prompt], {"max_tokens": limit, **logprobs}, max_choices, tools)


def text_call(given: Mapping[str, Any], *, max_choices: int) -> Call:
    """As `chat_call`. Several prompts have `n` answers each, those of the first prompt first."""
    body = _parsed(TextBody, given)
    if body.best_of not in (None, body.n):
        raise InvalidField("best_of: other than n is not supported yet", field="best_of")
    logprobs = {} if body.logprobs is None else {"logprobs": True, "top_logprobs": body.logprobs}
    return _call(Kind.TEXT, body, _prompts(body.prompt), {"max_tokens": body.max_tokens, **logprobs}, max_choices)


def derived_seed(seed: int, choice: int) -> int:
    """Of a prompt's choices. The first has the seed itself, so it is the same answer whatever n is."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _parsed(kind: type[B], given: Mapping[str, Any]) -> B:
    try:
        body = kind.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part)[:64] for part in first["loc"][:2])
        raise InvalidField(f"{field}: {reason(first)}", field=field) from None
    refuse_unsupported(body.model_extra or {})
    return body


def _call(
    kind: Kind,
    body: Body,
    prompts: list[dict[str, Any]],
    more: Mapping[str, Any],
    max_choices: int,
    tools: Toolbox | None = None,
) -> Call:
    if len(prompts) * body.n > max_choices:
        field = "n" if len(prompts) == 1 else "prompt"
        raise InvalidField(f"{field}: at most {max_choices} answers to one request", field=field)
    common = {name: value for name in _AS_THEY_ARE if (value := getattr(body, name)) is not None}
    common |= {name: value for name, value in more.items() if value is not None}
    if body.top_k is not None:
        common["top_k"] = max(body.top_k, 0)
    if stops := _stops(body, tools):
        common["stop"] = stops
    if body.ignore_eos:
        common["min_tokens"] = _no_end(body, common)
    if form := _form(body, tools):
        common["guided"] = form.guided
    if tools:
        common["tools"] = list(tools.tools)
    common["priority"] = _priority(body.priority)
    choices = [
        Choice(number, {**prompt, **common, **_seeded(body.seed, choice)})
        for number, prompt in enumerate(prompts)
        for choice in range(body.n)
    ]
    return Call(
        kind,
        body.model,
        tuple(choices),
        body.stream,
        _include_usage(body),
        tools.names if tools else (),
        form.field if form else "guided",
    )


def _stops(body: Body, tools: Toolbox | None) -> list[str]:
    """Bounds are the worker's, but for those of the tools' own."""
    if body.stop == "":
        raise InvalidField("stop: a stop string has at least 1 character", field="stop")
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    more = [stop for stop in (tools.stops if tools else ()) if stop not in given]
    if more and len(given) + len(more) > MAX_STOPS:
        told = f"stop: at most {MAX_STOPS - len(more)} where parallel_tool_calls is false"
        raise InvalidField(told, field="stop")
    return [*given, *more]


def _no_end(body: Body, common: Mapping[str, Any]) -> int:
    """`min_tokens` by which the model does not end the answer: no token of it is EOS."""
    if body.stop:
        raise InvalidField("ignore_eos: not together with stop", field="ignore_eos")
    return int(common.get("max_tokens", DEFAULT_MAX_TOKENS))


def _form(body: Body, tools: Toolbox | None) -> Form | None:
    form = form_of({name: getattr(body, name) for name in guided.SCHEMAS})
    if form is not None and body.ignore_eos:
        raise InvalidField("ignore_eos: an answer of a given form ends by itself", field="ignore_eos")
    if form is None or tools is None:
        return form or (tools.form if tools else None)
    told = f"{form.field}: not together with tools, unless tool_choice is none"
    raise InvalidField(told, field=form.field)


def _seeded(seed: int | None, choice: int) -> dict[str, int]:
    return {} if seed is None else {"seed": derived_seed(seed, choice)}


def _priority(given: str | int) -> str:
    if isinstance(given, str):
        return given
    return "high" if given < 0 else "low" if given > 0 else "normal"


def _include_usage(body: Body) -> bool:
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise InvalidField("stream_options: only with stream: true", field="stream_options")
    if not isinstance(options, dict):
        raise InvalidField("stream_options: an object", field="stream_options")
    for name, value in options.items():
        field = f"stream_options.{name[:64]}"
        if name not in _OPTIONS["properties"]:
            raise InvalidField(f"{field}: there is no such field", field=field)
        if not isinstance(value, bool | None):
            raise InvalidField(f"{field}: true or false", field=field)
    return bool(options.get("include_usage"))


def _prompts(value: Any) -> list[dict[str, Any]]:
    """Of a text, token ids, or a list of either."""
    if isinstance(value, str):
        return [{"prompt": messages.unicode(value, "prompt")}]
    if not isinstance(value, list):
        raise InvalidField("prompt: a text, a list of token ids, or a list of either", field="prompt")
    if not value:
        raise EmptyPrompt("prompt is empty", field="prompt")
    if all(isinstance(part, str) for part in value):
        return [{"prompt": messages.unicode(part, f"prompt.{i}")} for i, part in enumerate(value)]
    if all(isinstance(part, list) for part in value):
        return [_token_ids(part, f"prompt.{index}") for index, part in enumerate(value)]
    return [_token_ids(value, "prompt")]


def _token_ids(value: list[Any], path: str) -> dict[str, Any]:
    if not value:
        raise EmptyPrompt(f"{path} is empty", field=path)
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_INT:
            raise InvalidField(f"{path}.{index}: not a token id", field=f"{path}.{index}")
    return {"token_ids": value}
