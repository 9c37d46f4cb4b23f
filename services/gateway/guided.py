"""The form that an answer must have: as clients of OpenAI's API and of vLLM's ask for it, to a `Guided`. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shared.codec import reason
from shared.errors import InvalidField
from shared.messages import Guided

_NAME = re.compile("[A-Za-z0-9_-]{1,64}", re.ASCII)
_OBJECT: dict[str, Any] = {"type": "object"}
_STRINGS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}}
_KINDS: dict[str, Any] = {
    "json": {"anyOf": [_OBJECT, {"type": "string"}]},
    "regex": {"type": "string", "minLength": 1},
    "choice": _STRINGS,
    "grammar": {"type": "string", "minLength": 1},
}
"""vLLM's: what each may be."""
_JSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name", "schema"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
        "description": {"type": ["string", "null"]},
        "schema": _OBJECT,
        "strict": {"type": ["boolean", "null"]},
    },
}
FORMAT: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "required": ["type"],
            "additionalProperties": False,
            "properties": {"type": {"enum": ["text", "json_object"]}},
        },
        {
            "type": "object",
            "required": ["type", "json_schema"],
            "additionalProperties": False,
            "properties": {"type": {"const": "json_schema"}, "json_schema": _JSON_SCHEMA},
        },
    ]
}
STRUCTURED: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"json_object": {"type": ["boolean", "null"]}, **_KINDS},
}
SCHEMAS: Mapping[str, dict[str, Any]] = {
    "response_format": FORMAT,
    "structured_outputs": STRUCTURED,
    **{f"guided_{kind}": schema for kind, schema in _KINDS.items()},
}
"""JSON schemas of the fields by which a form is asked for."""


@dataclass(frozen=True, slots=True)
class Form:
    """`field` asked for it, and is to blame where it cannot be had."""

    guided: Guided
    field: str


def form_of(given: Mapping[str, Any]) -> Form | None:
    """Of a body's fields, those of `SCHEMAS`. Raises InvalidField naming the one that is wrong, or one too many."""
    found: list[Form] = []
    for name, read in _READERS.items():
        if (value := given.get(name)) is not None and (form := read(value, name)) is not None:
            found.append(form)
    if len(found) > 1:
        field = found[1].field
        raise InvalidField(f"{field}: {found[0].field} asks for another form; give one", field=field)
    return found[0] if found else None


def _format(value: Any, path: str) -> Form | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        told = "json_schema, json_object or text"
        raise InvalidField(f"{path}.type: one of {told}; other forms are not supported", field=f"{path}.type")
    _no_others(value, ("type", "json_schema") if kind == "json_schema" else ("type",), path)
    if kind == "text":
        return None
    if kind == "json_object":
        return _form({"json_object": True}, path)
    inner, inside = value.get("json_schema"), f"{path}.json_schema"
    if not isinstance(inner, dict):
        raise InvalidField(f"{inside}: an object with a name and a schema", field=inside)
    _no_others(inner, ("name", "description", "schema", "strict"), inside)
    if not isinstance(inner.get("name"), str) or not _NAME.fullmatch(inner["name"]):
        raise InvalidField(f"{inside}.name: 1 to 64 of A-Z a-z 0-9 _ -", field=f"{inside}.name")
    for name, type_ in (("description", str), ("strict", bool)):
        if not isinstance(inner.get(name), type_ | None):
            raise InvalidField(f"{inside}.{name}: of type {type_.__name__}", field=f"{inside}.{name}")
    if not isinstance(inner.get("schema"), dict):
        raise InvalidField(f"{inside}.schema: a JSON schema, which is an object", field=f"{inside}.schema")
    return _form({"json_schema": inner["schema"]}, f"{inside}.schema")


def _structured(value: Any, path: str) -> Form | None:
    """vLLM's newer name for its `guided_` fields."""
    if not isinstance(value, dict):
        raise InvalidField(f"{path}: an object", field=path)
    _no_others(value, STRUCTURED["properties"], path)
    flag = value.get("json_object")
    if not isinstance(flag, bool | None):
        raise InvalidField(f"{path}.json_object: true or false", field=f"{path}.json_object")
    given = [kind for kind in _KINDS if value.get(kind) is not None]
    if len(given) + bool(flag) > 1:
        raise InvalidField(f"{path}: asks for more than one form", field=path)
    if flag:
        return _form({"json_object": True}, f"{path}.json_object")
    return _kind(given[0])(value[given[0]], f"{path}.{given[0]}") if given else None


def _kind(kind: str) -> Callable[[Any, str], Form]:
    def read(value: Any, path: str) -> Form:
        if kind != "json":
            return _form({kind: value}, path)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise InvalidField(f"{path}: not JSON", field=path) from None
        if not isinstance(value, dict):
            raise InvalidField(f"{path}: a JSON schema, which is an object", field=path)
        return _form({"json_schema": value}, path)

    return read


_READERS: Mapping[str, Callable[[Any, str], Form | None]] = {
    "response_format": _format,
    "structured_outputs": _structured,
    **{f"guided_{kind}": _kind(kind) for kind in _KINDS},
}


def _form(fields: dict[str, Any], path: str) -> Form:
    return Form(guided(fields, path), path)


def guided(fields: Mapping[str, Any], path: str) -> Guided:
    """Raises InvalidField naming `path`."""
    try:
        return Guided.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise InvalidField(f"{path}: {reason(first)}", field=path) from None
    except UnicodeEncodeError:
        raise InvalidField(f"{path}: a lone surrogate", field=path) from None


def _no_others(value: Mapping[str, Any], names: Any, path: str) -> None:
    for name, inner in value.items():
        if name not in names and inner is not None:
            field = f"{path}.{name[:64]}"
            raise InvalidField(f"{field}: there is no such field", field=field)
