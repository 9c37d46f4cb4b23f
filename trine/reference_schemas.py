"""JSON Schemas of all messages, with what their source says about each field, and each field in a few words."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from shared.cache import frames
from shared.messages import MAX_STOP_CHARS, MAX_STOPS, MESSAGE_TYPES
from trine.reference_channels import BLOCK_FRAME

REFERENCE = "#/components/schemas/"
Schema = dict[str, Any]


def schemas() -> dict[str, Schema]:
    """By name: messages, what they contain, and the frame of a cached block."""
    _, found = models_json_schema(
        [(message, "validation") for message in MESSAGE_TYPES], ref_template=REFERENCE + "{model}"
    )
    out: dict[str, Schema] = dict(sorted(found["$defs"].items()))
    for model in _models(MESSAGE_TYPES):
        _annotate(out[model.__name__], model)
    _sampling(out["Generate"], out["Sampling"])
    out[BLOCK_FRAME] = _frame()
    return out


def _sampling(generate: Schema, sampling: Schema) -> None:
    """What a request says of sampling is checked as `Sampling`, so its bounds are those."""
    generate["properties"]["stop"]["description"] = f"At most {MAX_STOPS}, of 1 to {MAX_STOP_CHARS} characters each."
    for name, bounds in sampling["properties"].items():
        kept = {key: value for key, value in bounds.items() if key not in ("default", "description", "anyOf")}
        options = [*bounds.get("anyOf", [kept, {"type": "null"}])]
        told_ = {"description": bounds["description"]} if "description" in bounds else {}
        generate["properties"][name] = {"anyOf": options, "default": None, **told_}


def _models(roots: Iterable[type[BaseModel]]) -> set[type[BaseModel]]:
    """These and all that their fields mention."""
    found: set[type[BaseModel]] = set()
    left: list[Any] = list(roots)
    while left:
        kind = left.pop()
        left += getattr(kind, "__args__", ())
        if inspect.isclass(kind) and issubclass(kind, BaseModel) and kind not in found:
            found.add(kind)
            left += [field.annotation for field in kind.model_fields.values()]
    return found


def _annotate(schema: Schema, model: type[BaseModel]) -> None:
    schema.pop("title", None)
    if inspect.cleandoc(model.__doc__ or "") == inspect.cleandoc(model.__base__.__doc__ or ""):
        schema.pop("description", None)  # inherited
    docs: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base is not BaseModel and issubclass(base, BaseModel):
            docs |= field_docs(base)
    for name, field in schema.get("properties", {}).items():
        field.pop("title", None)
        if name in docs:
            field["description"] = docs[name]


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field in the class's source, as one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            docs[before.target.id] = " ".join(ast.literal_eval(after.value).split())
    return docs


def _frame() -> Schema:
    text = (
        f"One part of a cached block, in bytes: `{frames.MAGIC.decode()}`, the header's length (u32, little-endian), "
        f"the header (a msgpack map, at most {frames.MAX_HEADER} bytes) with the fields of `shared/cache/frames.py` "
        f"(version {frames.VERSION}), zeros up to a multiple of 64, then at most {frames.PART_BYTES} bytes of KV."
    )
    return {"type": "string", "format": "binary", "maxLength": frames.MAX_FRAME, "description": text}


def told(schema: Schema) -> str:
    """A field's type and bounds in words."""
    if name := schema.get("$ref", "").removeprefix(REFERENCE):
        return f"[{name}](#{name.lower()})"
    if options := schema.get("anyOf"):
        return " or ".join(told(option) for option in options)
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return f"list of {told(schema.get('items', {}))}{_count(schema, 'Items', '')}"
    if kind == "object":
        values = schema.get("additionalProperties")
        of = f" of {told(values)}" if isinstance(values, dict) else ""
        return f"map{of}{_count(schema, 'Properties', '')}"
    if kind == "string":
        binary = schema.get("format") == "binary"
        pattern = f" like `{schema['pattern']}`" if "pattern" in schema else ""
        return (
            ("bytes" if binary else "text") + _count(schema, "Length", " bytes" if binary else " characters") + pattern
        )
    names = {"integer": "integer", "number": "number", "boolean": "true or false", "null": "null", None: "anything"}
    return names[kind] + _range(schema)


def _count(schema: Schema, of: str, unit: str) -> str:
    low, high = schema.get(f"min{of}", 0), schema.get(f"max{of}")
    if high is None:
        return f", at least {low}{unit}" if low else ""
    return f", {low} to {high}{unit}" if low else f", at most {high}{unit}"


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    parts = [f"from {low}" if low is not None else "", f"above {above}" if above is not None else ""]
    parts.append(f"to {high}" if high is not None else "")
    said = " ".join(part for part in parts if part)
    return f", {said}" if said else ""
