"""docs/protocol-reference.md: all subjects, streams and messages as tables."""

from __future__ import annotations

import json
from typing import Any

from shared.messages import MESSAGE_TYPES, PROTOCOL_VERSION, Message
from trine.reference_channels import MADE_BY, PARAMETERS, Channel, channels, hearers, publishers, readers, streams
from trine.reference_schemas import Schema, schemas, told

MEANINGS = {
    "REQ": "requests that wait or are being answered",
    "PREFILL": "prefill jobs",
    "TOK": "events of requests",
    "CLAIM": "the log of claims",
    "ATTEMPT": "attempts at requests",
    "DEAD": "dead letters",
    "KV": "cached blocks",
}


def page() -> str:
    """docs/protocol-reference.md."""
    known = schemas()
    lines = [
        "# Protocol reference",
        "",
        f"{MADE_BY} [protocol.md](protocol.md) explains it; [asyncapi.yaml](asyncapi.yaml) is the same for programs.",
        "",
        f"Protocol version {PROTOCOL_VERSION}, in each message's field `v`. Messages are msgpack maps; `Generate` and "
        "the events of its request may be JSON, told by a first byte `{`. Unknown fields are refused. In a subject, "
        "bytes of a name other than `A-Z a-z 0-9 - _` are spelled `=XX`.",
        "",
        "## Subjects",
        "",
        "Who may publish and hear is what `trine access` allows on a [server with users](security.md); `tenant` stands "
        "for clients of any tenant, on their own subjects. *Reads*: takes it out of its stream, or looks it up there.",
        "",
        "| subject | message | reply | stream | publishes | hears | reads |",
        "|---|---|---|---|---|---|---|",
        *(_row(channel) for channel in channels()),
        "",
        *(f"- `{{{name}}}`: {text}" for name, text in PARAMETERS.items()),
        "",
    ]
    for channel in channels():
        lines.append(f"**{channel.name}.** {channel.meaning}\n")
    lines += ["## Streams", "", *_streams(), "", "## Messages", ""]
    for message in MESSAGE_TYPES:
        lines += _message(message, known[message.__name__])
    lines += ["## Parts of messages", ""]
    named = {message.__name__ for message in MESSAGE_TYPES}
    for name, schema in known.items():
        if name not in named:
            lines += _table(name, schema)
    return "\n".join(lines).rstrip() + "\n"


def _row(channel: Channel) -> str:
    sent = ", ".join(_link(m) for m in channel.messages) or "empty"
    answer = _link(channel.reply) if channel.reply else ""
    users = [", ".join(of(channel)) for of in (publishers, hearers, readers)]
    addresses = "<br>".join(f"`{a}`" for a in channel.addresses)
    return f"| {addresses} | {sent} | {answer} | {channel.stream} | {' | '.join(users)} |"


def _link(message: type[Message] | str) -> str:
    name = message if isinstance(message, str) else message.__name__
    return f"[{name}](#{name.lower()})"


def _streams() -> list[str]:
    lines = [
        "Each is `TRINE_<model>_<kind>`, made by whoever needs it first. Bounds are those of the default settings.",
        "",
        "| kind | holds | kept | storage | when full | bounds |",
        "|---|---|---|---|---|---|",
    ]
    for kind, spec in streams().items():
        full = "refuses" if spec.discard == "new" else "drops the oldest"
        kept = (
            "until acked" if spec.retention == "workqueue" else "until it is too old" if spec.max_age else "until full"
        )
        bounds = {
            "messages": spec.max_msgs,
            "bytes": spec.max_bytes,
            "per subject": spec.max_msgs_per_subject,
            "bytes each": spec.max_msg_size,
            "seconds": int(spec.max_age),
        }
        told_ = ", ".join(f"{value:,} {unit}" for unit, value in bounds.items() if value > 0)
        lines.append(f"| {kind} | {MEANINGS[kind]} | {kept} | {spec.storage} | {full} | {told_} |")
    return lines


def _message(message: type[Message], schema: Schema) -> list[str]:
    return _table(message.__name__, schema, f"At most {message.max_bytes:,} bytes.")


def _table(name: str, schema: Schema, note: str = "") -> list[str]:
    text = " ".join(f"{schema.get('description', '')} {note}".split())
    lines = [f"### {name}", "", text, ""] if text else [f"### {name}", ""]
    if fields := schema.get("properties"):
        lines += ["| field | type and bounds | unless given | |", "|---|---|---|---|"]
        lines += [_field(key, field, key in schema.get("required", [])) for key, field in fields.items()]
        lines.append("")
    return lines


def _field(name: str, field: Schema, required: bool) -> str:
    default = "" if required else "" if "const" in field else f"`{_plain(field.get('default'))}`"
    cells = [f"`{name}`", told(field), "must be given" if required else default, field.get("description", "")]
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _plain(value: Any) -> str:
    """As JSON, except that a text stands without quotes."""
    return value if isinstance(value, str) and value else json.dumps(value)
