"""Tools that a model may call, and the calls it made of them, as in OpenAI's chat API."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from shared.messages.guided import JsonObject

MAX_TOOLS = 128
MAX_CALLS = 128
"""In one message."""
MAX_CALL_ID = 256
MAX_DESCRIPTION = 16 << 10
MAX_ARGUMENTS = 1 << 20
"""Characters of a call's arguments."""
MAX_ARGUMENTS_DEPTH = 32
TOOL_NAME = "^[A-Za-z0-9_-]{1,64}$"

ToolName = Annotated[str, Field(pattern=TOOL_NAME)]
CallId = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID)]


def arguments_of(text: str) -> dict[str, Any]:
    """The object that a call's arguments spell. Raises ValueError saying what else they are."""
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    if not isinstance(value, dict):
        raise ValueError("the arguments of a call are a JSON object")
    level: list[Any] = [value]
    for _ in range(MAX_ARGUMENTS_DEPTH):
        within = [inner for inner in level if isinstance(inner, dict | list)]
        level = [value for inner in within for value in (inner.values() if isinstance(inner, dict) else inner)]
    if any(isinstance(inner, dict | list) for inner in level):
        raise ValueError(f"nested deeper than {MAX_ARGUMENTS_DEPTH} levels")
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    if (value := float(text)) - value != 0:
        raise ValueError(f"the number {text:.40} is too large")
    return value


def _spells_an_object(text: str) -> str:
    arguments_of(text)
    return text


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Function(_Part):
    name: ToolName
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    parameters: JsonObject | None = None
    """A JSON schema of the object of its arguments, for the model to read; unset: it takes none."""
    strict: bool | None = None


class Tool(_Part):
    """What a model is told of. It is for the asker to run it."""

    type: Literal["function"] = "function"
    function: Function


class FunctionCall(_Part):
    name: ToolName
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENTS), AfterValidator(_spells_an_object)]
    """A JSON object, as text."""


class ToolCall(_Part):
    """`id` is repeated by the `tool` message that has the result."""

    id: CallId
    type: Literal["function"] = "function"
    function: FunctionCall
