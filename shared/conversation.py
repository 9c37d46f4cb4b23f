"""A chat as plain values, as chat templates read it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shared.messages import ChatMessage, Tool
from shared.messages.tools import arguments_of


def conversation(messages: Sequence[ChatMessage], tools: Sequence[Tool] | None) -> dict[str, Any]:
    """The arguments of `ChatTemplate.render`. Content is always a text, and the arguments of a call are an object."""
    told = [tool.model_dump(exclude_none=True) for tool in tools or ()]
    for tool in told:
        tool["function"].pop("strict", None)  # a promise to the asker, no word for the model
        tool["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return {"messages": [_message(message) for message in messages], "tools": told or None}


def _message(message: ChatMessage) -> dict[str, Any]:
    given = message.model_dump(exclude_none=True)
    for call in given.get("tool_calls", ()):
        call["function"]["arguments"] = arguments_of(call["function"]["arguments"])
    return {**given, "content": message.content or ""}


def texts_in(value: Any) -> Iterator[str]:
    """All texts in it, names of members of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)


def with_texts(given: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The same conversation with each text changed that an asker may choose: all but the roles."""
    messages = [{**_changed(message, change), "role": message["role"]} for message in given["messages"]]
    return {"messages": messages, "tools": _changed(given["tools"], change)}


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _changed(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_changed(inner, change) for inner in value]
    return value
