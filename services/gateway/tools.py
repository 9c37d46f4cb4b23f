"""Tools that a chat may call, as OpenAI's clients offer them: what the model is told, and what it is held to. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from services.gateway.guided import Form, guided
from services.gateway.messages import unicode
from services.gateway.tool_calls import CLOSE, OPEN
from shared.codec import reason
from shared.errors import InvalidField
from shared.messages import Tool
from shared.messages.guided import MAX_TAGS
from shared.messages.tools import MAX_TOOLS, TOOL_NAME

_TOOLS: TypeAdapter[list[Tool]] = TypeAdapter(list[Tool])
_FUNCTION: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": TOOL_NAME},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
SCHEMA: dict[str, Any] = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "additionalProperties": False,
        "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    },
}
_NAMED: dict[str, Any] = {
    "type": "object",
    "required": ["type", "function"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {"name": {"type": "string"}},
        },
    },
}
CHOICE_SCHEMA: dict[str, Any] = {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED]}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What is offered. `form`: what the answer is held to; `stops`: where it is cut off, which shows no text."""

    tools: tuple[Tool, ...]
    form: Form | None = None
    stops: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool.function.name for tool in self.tools)


def toolbox(tools: Any, choice: Any, parallel: bool) -> Toolbox | None:
    """None where nothing may be called. Raises InvalidField naming what is wrong.

    Where the model has to call, or all functions are `strict`, grammar sees to well-formed calls.
    """
    offered = _offered(tools)
    named = _named(choice)
    if not offered:
        if named is not None or choice == "required":
            raise InvalidField("tool_choice: there are no tools to call", field="tool_choice")
        return None
    if choice == "none":
        return None
    if named is not None and named not in [tool.function.name for tool in offered]:
        raise InvalidField(f"tool_choice: no tool is named {named!r:.70}", field="tool_choice.function.name")
    callable_ = [tool for tool in offered if named in (None, tool.function.name)]
    required = named is not None or choice == "required"
    if required or all(tool.function.strict for tool in callable_):
        return Toolbox(offered, _form(callable_, required, named is not None or not parallel))
    return Toolbox(offered, stops=() if parallel else (CLOSE,))


def _offered(value: Any) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidField("tools: a list of tools", field="tools")
    if len(value) > MAX_TOOLS:
        raise InvalidField(f"tools: {len(value)} of them; at most {MAX_TOOLS} are accepted", field="tools")
    for index, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            field = f"tools.{index}.type"
            raise InvalidField(f"{field}: only tools of type function are supported", field=field)
    try:
        tools = tuple(_TOOLS.validate_python(value))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(["tools", *(str(part)[:64] for part in first["loc"][:3])])
        raise InvalidField(f"{field}: {reason(first)}", field=field) from None
    unicode(json.dumps(value, ensure_ascii=False), "tools")
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            field = f"tools.{index}.function.name"
            raise InvalidField(f"{field}: another tool has this name", field=field)
    return tools


def _named(choice: Any) -> str | None:
    """The function that has to be called."""
    if choice is None or choice in ("none", "auto", "required"):
        return None
    if isinstance(choice, dict) and choice.get("type") == "function" and set(choice) == {"type", "function"}:
        function = choice["function"]
        if isinstance(function, dict) and set(function) == {"name"} and isinstance(function["name"], str):
            return function["name"]
    told = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
    raise InvalidField(f"tool_choice: {told}", field="tool_choice")


def _form(tools: Sequence[Tool], required: bool, single: bool) -> Form:
    if len(tools) > MAX_TAGS:
        told = f"tools: at most {MAX_TAGS} where calls are certain to be well-formed (required, or strict)"
        raise InvalidField(told, field="tools")
    tags = [
        {
            "begin": f'{OPEN}\n{{"name": "{tool.function.name}", "arguments": ',
            "json_schema": tool.function.parameters or {"type": "object", "properties": {}},
            "end": f"}}\n{CLOSE}",
        }
        for tool in tools
    ]
    form = {"tags": {"triggers": [OPEN], "tags": tags, "required": required, "single": single}}
    return Form(guided(form, "tools"), "tools")
