"""What forms may be asked for: one kind, bounded, and nothing that an answer would not be held to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from shared.codec import Format, decode, encode
from shared.errors import InvalidField
from shared.messages import Generate, Guided
from shared.messages.guided import MAX_SCHEMA_DEPTH
from shared.messages.json_schema import _schemas


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


TAG = {"begin": "<t>", "json_schema": {}, "end": "</t>"}
GOOD: list[dict[str, Any]] = [
    {"json_schema": {"type": "object", "properties": {"b": {"const": None}, "a": {"enum": [1, None, 2.5]}}}},
    {"json_schema": nested(MAX_SCHEMA_DEPTH)},
    {"json_object": True},
    {"regex": "(?:a|b)+"},
    {"choice": ["ja", "nein"]},
    {"grammar": 'root ::= "a"'},
    {"tags": {"triggers": ["<"], "tags": [TAG]}},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "guided"),
    ({"regex": "a", "choice": ["b"]}, "guided"),
    ({"json_schema": True}, "guided.json_schema"),
    ({"json_object": False}, "guided.json_object"),
    ({"json_schema": nested(MAX_SCHEMA_DEPTH + 1)}, "guided.json_schema"),
    ({"json_schema": {"enum": list(range(5000))}}, "guided.json_schema"),
    ({"json_schema": {"const": float("inf")}}, "guided.json_schema"),
    ({"json_schema": {"title": "x" * 70_000}}, "guided"),
    ({"regex": "a" * 3000}, "guided.regex"),
    ({"regex": "(?=a)b"}, "guided.regex"),
    ({"choice": []}, "guided.choice"),
    ({"grammar": "r ::= r\n" * 2000}, "guided.grammar"),
    ({"tags": {"triggers": ["<", "<t"], "tags": [TAG]}}, "guided.tags"),
    ({"tags": {"triggers": ["<"], "tags": [{**TAG, "json_schema": {"not": {}}}]}}, "guided.tags.tags"),
]


@pytest.mark.parametrize("format", Format)
def test_a_form_crosses_the_bus_with_its_order(format: Format) -> None:
    for form in GOOD:
        sent = Generate(id="a", prompt="x", guided=Guided(**form))
        back = decode(encode(sent, format), Generate)
        assert back == sent and back.guided is not None and sent.guided is not None
        assert back.guided.canonical == sent.guided.canonical
    assert '{"b":{"const":null},"a":{"enum":[1,null,2.5]}}' in Guided(**GOOD[0]).canonical


@pytest.mark.parametrize(("form", "field"), BAD)
def test_what_is_refused_and_which_field_is_named(form: dict[str, Any], field: str) -> None:
    data = json.dumps({"id": "a", "prompt": "x", "guided": form}).encode()
    with pytest.raises(InvalidField) as caught:
        decode(data, Generate)
    assert caught.value.field == field and len(caught.value.message) < 400


UNSEEN: list[dict[str, Any]] = [
    {"not": {}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "integer"}},
    {"properties": {"a": {"items": {"if": {}}}}},
    {"$ref": "http://example.com/schema"},
    {"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer"}}},
    {"allOf": [{"type": "integer"}, {"maximum": 3}]},
    {"anyOf": [{"required": ["a"]}], "properties": {"a": {}}},
    {"minLength": 3},
    {"type": "number", "multipleOf": 0.1},
    {"type": "string", "pattern": "^a+$", "maxLength": 3},
    {"type": "string", "pattern": "^(?!b)"},
    {"type": "object", "properties": {"a": {}}, "required": ["b"]},
    {"patternProperties": {"(?=a)": {}}, "type": "object"},
    {"$defs": {"x": {"dependentRequired": {}}}},
    {"prefixItems": [{"anyOf": [{"enum": [1], "minimum": 0}]}]},
]


@pytest.mark.parametrize("schema", UNSEEN)
def test_what_an_answer_would_not_be_held_to_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"support|needs a type|not among"):
        Guided(json_schema=schema)


def test_a_long_name_is_not_copied_to_every_place_below_it() -> None:
    schema = {"properties": {"k" * 100_000: {"properties": {"a": {}, "b": nested(20)}}}}
    assert max(len(place) for place, _ in _schemas("$", schema)) < 1000


class Address(BaseModel):
    street: str
    number: int | None = None


class Person(BaseModel):
    """As most schemas are made."""

    name: str
    home: Address
    others: list[Address] = []
    more: dict[str, float] | None = None


def test_what_names_look_like_keywords_is_nothing_to_fear() -> None:
    Guided(json_schema=Person.model_json_schema())
    Guided(
        json_schema={"properties": {"not": {"type": "string"}, "if": {}}, "required": ["not"], "default": {"not": 1}}
    )
    Guided(json_schema={"enum": [{"not": 1}], "title": "minLength"})
