"""Chat messages as OpenAI's clients send them, to those of a `Generate` request."""

from __future__ import annotations

from typing import Any

from shared.errors import EmptyPrompt, InvalidField

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""OpenAI's models call `developer` what others call `system`."""
NULL = frozenset({"annotations", "audio", "function_call", "refusal", "tool_calls", "tool_call_id", "name"})
"""Fields that messages of an earlier answer bring along empty; anything in them would have to be heeded."""
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "additionalProperties": False,
        "properties": {
            "role": {"enum": [*ROLES]},
            "content": {
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
            },
        },
    },
}


def chat_messages(value: Any, most: int) -> list[dict[str, str]]:
    """Raises EmptyPrompt, or InvalidField naming the part that cannot be used. Nothing is left out silently."""
    if not isinstance(value, list):
        raise InvalidField("messages: a list of messages", field="messages")
    if not value:
        raise EmptyPrompt("messages is empty", field="messages")
    if len(value) > most:
        raise InvalidField(f"messages: {len(value)} of them; at most {most} are accepted", field="messages")
    return [_message(message, f"messages.{index}") for index, message in enumerate(value)]


def _message(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise InvalidField(f"{path}: a message is an object", field=path)
    role = value.get("role")
    if role in ("tool", "function"):
        raise InvalidField(f"{path}.role: {role} messages are not supported yet", field=f"{path}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidField(f"{path}.role: one of {', '.join(ROLES)}", field=f"{path}.role")
    for name, given in value.items():
        field = f"{path}.{name[:64]}"
        if name in ("role", "content") or given is None or (name in NULL and given == []):
            continue
        told = "not supported yet" if name in NULL else "there is no such field"
        raise InvalidField(f"{field}: {told}", field=field)
    return {"role": ROLES[role], "content": _content(value.get("content"), f"{path}.content")}


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
