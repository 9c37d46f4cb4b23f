"""Chat messages as OpenAI's clients send them, to those of a `Generate` request."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from shared.codec import reason
from shared.errors import EmptyPrompt, InvalidField
from shared.messages import ToolCall
from shared.messages.tools import MAX_CALL_ID, MAX_CALLS, TOOL_NAME

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI's models call `developer` what others call `system`."""
NULL = frozenset({"annotations", "audio", "function_call", "refusal", "tool_calls", "tool_call_id", "name"})
"""Fields that messages of an earlier answer bring along empty; anything in them would have to be heeded."""
_CALLS: TypeAdapter[list[ToolCall]] = TypeAdapter(list[ToolCall])
_CONTENT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "additionalProperties": False,
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}
_CALL: dict[str, Any] = {
    "type": "object",
    "required": ["id", "type", "function"],
    "additionalProperties": False,
    "properties": {
        "index": {"type": "integer"},
        "id": {"type": "string", "minLength": 1, "maxLength": MAX_CALL_ID},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string", "pattern": TOOL_NAME},
                "arguments": {"type": "string", "description": "An object in JSON."},
            },
        },
    },
}


def _schema(*roles: str, required: tuple[str, ...] = ("content",), **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["role", *required],
        "additionalProperties": False,
        "properties": {"role": {"enum": list(roles)}, "content": _CONTENT, **more},
    }


SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _schema("system", "developer", "user", "assistant"),
            _schema(
                "assistant",
                required=("tool_calls",),
                content={"anyOf": [{"type": "null"}, _CONTENT]},
                tool_calls={"type": "array", "minItems": 1, "maxItems": MAX_CALLS, "items": _CALL},
            ),
            _schema(
                "tool",
                tool_call_id={"type": "string", "minLength": 1, "maxLength": MAX_CALL_ID},
                name={"type": "string", "pattern": TOOL_NAME},
            ),
        ]
    },
}


def chat_messages(value: Any, most: int) -> list[dict[str, Any]]:
    """Raises EmptyPrompt, or InvalidField naming the part that cannot be used. Nothing is left out silently."""
    if not isinstance(value, list):
        raise InvalidField("messages: a list of messages", field="messages")
    if not value:
        raise EmptyPrompt("messages is empty", field="messages")
    if len(value) > most:
        raise InvalidField(f"messages: {len(value)} of them; at most {most} are accepted", field="messages")
    return [_message(message, f"messages.{index}") for index, message in enumerate(value)]


def _message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidField(f"{path}: a message is an object", field=path)
    role = value.get("role")
    if role == "function":
        raise InvalidField(
            f"{path}.role: function messages are not supported; send tool messages", field=f"{path}.role"
        )
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidField(f"{path}.role: one of {', '.join(ROLES)}", field=f"{path}.role")
    own = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}.get(role, ())
    for name, given in value.items():
        field = f"{path}.{name[:64]}"
        if name in ("role", "content", *own) or given is None or (name in NULL and given == []):
            continue
        told = "not supported for this role" if name in NULL else "there is no such field"
        raise InvalidField(f"{field}: {told}", field=field)
    message: dict[str, Any] = {"role": ROLES[role]}
    if calls := value.get("tool_calls"):
        message["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
    if role == "tool":
        message |= {name: value[name] for name in own if value.get(name) is not None}
    if value.get("content") is not None or not calls:
        message["content"] = _content(value.get("content"), f"{path}.content")
    return message


def _tool_calls(value: Any, path: str) -> list[ToolCall]:
    """`index` is left out: it is of the stream that the calls came in."""
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise InvalidField(f"{path}: a list of up to {MAX_CALLS} calls", field=path)
    calls = [{k: v for k, v in call.items() if k != "index"} if isinstance(call, dict) else call for call in value]
    try:
        return _CALLS.validate_python(calls)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join([path, *(str(part)[:64] for part in first["loc"][:3])])
        raise InvalidField(f"{field}: {reason(first)}", field=field) from None


def _content(value: Any, path: str) -> str:
    """Parts follow each other without anything between them: no character is added that nobody wrote."""
    if isinstance(value, str):
        return unicode(value, path)
    if not isinstance(value, list) or not value:
        raise InvalidField(f"{path}: a text, or a list of text parts", field=path)
    return "".join(_part(part, f"{path}.{index}") for index, part in enumerate(value))


def _part(value: Any, path: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise InvalidField(f'{path}: a part is {{"type": "text", "text": ...}}', field=path)
    if value["type"] != "text":
        raise InvalidField(f"{path}.type: {value['type'][:40]!r} parts are not supported yet", field=f"{path}.type")
    if not isinstance(value.get("text"), str) or len(value) > 2:
        raise InvalidField(f"{path}.text: a text part has a text and nothing else", field=f"{path}.text")
    return unicode(value["text"], f"{path}.text")


def unicode(text: str, path: str) -> str:
    """The text itself. Raises InvalidField for one that JSON can spell and nothing else can: lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidField(f"{path}: a lone surrogate at character {error.start}", field=path) from None
    return text
