"""docs/asyncapi.yaml: the same as AsyncAPI 3.0 (https://www.asyncapi.com/docs/reference/specification/v3.0.0)."""

from __future__ import annotations

from typing import Any

from shared.messages import PROTOCOL_VERSION
from trine.reference_channels import BLOCK_FRAME, MADE_BY, PARAMETERS, Channel, channels, hearers, publishers, readers
from trine.reference_schemas import REFERENCE, schemas

INBOX = "inbox"
"""Where answers come: the reply subject of the message that they answer."""


def asyncapi() -> dict[str, Any]:
    """docs/asyncapi.yaml: AsyncAPI 3.0 (https://www.asyncapi.com/docs/reference/specification/v3.0.0)."""
    described = channels()
    answers: dict[str, Any] = {"address": None, "description": "The reply subject of a message.", "messages": {}}
    answers["messages"] = {c.reply.__name__: _message_of(c.reply.__name__) for c in described if c.reply}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Trine",
            "version": str(PROTOCOL_VERSION),
            "description": f"LLM serving on NATS. {MADE_BY}",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/msgpack",
        "servers": {"nats": {"host": "127.0.0.1:4222", "protocol": "nats"}},
        "channels": {
            **{_key(c.name, number): _channel(c, a) for c in described for number, a in enumerate(c.addresses)},
            INBOX: answers,
        },
        "operations": {name: op for c in described for name, op in _operations(c).items()},
        "components": {"messages": _messages(described), "schemas": schemas()},
    }


def _key(name: str, number: int) -> str:
    """The second address of a channel is that of tenants."""
    return name.replace(" ", "-") + ("-of-tenant" if number else "")


def _channel(channel: Channel, address: str) -> dict[str, Any]:
    users = {"x-publishes": publishers(channel), "x-hears": hearers(channel), "x-reads": readers(channel)}
    parameters = {name: {"description": text} for name, text in PARAMETERS.items() if f"{{{name}}}" in address}
    stream = {"x-stream": f"TRINE_{{model}}_{channel.stream}"} if channel.stream else {}
    return {
        "address": address,
        "description": channel.meaning,
        "messages": {name: _message_of(name) for name in _names(channel)},
        "parameters": parameters,
        **stream,
        **users,
    }


def _message_of(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/messages/{name}"}


def _names(channel: Channel) -> list[str]:
    """Of the messages that are published there."""
    return [m if isinstance(m, str) else m.__name__ for m in channel.messages] or ["Empty"]


def _operations(channel: Channel) -> dict[str, Any]:
    """One for each address: what a program that publishes there does."""
    found = {}
    for number in range(len(channel.addresses)):
        key = _key(channel.name, number)
        at = f"#/channels/{key}"
        operation: dict[str, Any] = {
            "action": "send",
            "channel": {"$ref": at},
            "messages": [{"$ref": f"{at}/messages/{name}"} for name in _names(channel)],
        }
        if channel.reply:
            operation["reply"] = {
                "address": {"location": "$message.header#/reply"},
                "channel": {"$ref": f"#/channels/{INBOX}"},
                "messages": [{"$ref": f"#/channels/{INBOX}/messages/{channel.reply.__name__}"}],
            }
        found[f"publish-{key}"] = operation
    return found


def _messages(described: tuple[Channel, ...]) -> dict[str, Any]:
    named = {name for c in described for name in _names(c)} | {c.reply.__name__ for c in described if c.reply}
    both = {name for c in described if c.json for name in _names(c)}
    found: dict[str, Any] = {}
    for name in sorted(named - {"Empty"}):
        found[name] = {"name": name, "payload": {"$ref": f"{REFERENCE}{name}"}}
        if name == BLOCK_FRAME:
            found[name]["contentType"] = "application/octet-stream"
        if name in both:
            found[name]["summary"] = "As JSON or as msgpack."
    return {"Empty": {"summary": "An empty message.", "payload": {"type": "null"}}, **found}
