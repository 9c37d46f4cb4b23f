"""Messages made from their own JSON schemas: bodies that fit, and bodies that all but fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgpack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.codec import Format, decode, encode
from shared.errors import RequestError
from shared.messages import MESSAGE_TYPES, Event, Generate, Message
from tests.fuzz.messages import tellable

Schema = Mapping[str, Any]
MOST_ITEMS = 3
MOST_CHARACTERS = 12
TEXT = st.characters(exclude_categories=["Cs"])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(TEXT) | st.binary(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(TEXT), inner, max_size=2),
    max_leaves=4,
)


@cache
def bodies(kind: type[Message]) -> st.SearchStrategy[dict[str, Any]]:
    """What fits the schema; validators may still refuse it."""
    schema = kind.model_json_schema()
    return _made(schema, schema.get("$defs", {}))


@cache
def nearly(kind: type[Message]) -> st.SearchStrategy[Any]:
    """The same with one thing in it taken away, replaced or added."""

    @st.composite
    def one(draw: st.DrawFn) -> Any:
        body = draw(bodies(kind))
        at: Any = body
        while True:
            keys: list[Any] = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = draw(st.sampled_from(keys)) if keys else None
            if key is None or not isinstance(at[key], dict | list) or draw(st.booleans()):
                break
            at = at[key]
        change = draw(st.sampled_from(["take away", "replace", "add"]))
        if change == "add" or key is None:
            if isinstance(at, dict):
                at[draw(st.text(TEXT))] = draw(JUNK)
            else:
                at.append(draw(JUNK))
        elif change == "replace":
            at[key] = draw(JUNK)
        else:
            del at[key]
        return body

    return one()


def _made(schema: Schema, defs: Schema) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: _made(defs[name], defs))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return st.one_of([_made(one, defs) for one in schema[several]])
    return _MAKERS[schema["type"]](schema, defs) if "type" in schema else JUNK


def _object(schema: Schema, defs: Schema) -> st.SearchStrategy[Any]:
    # The version as it is: any other one refuses the whole message.
    fields = {k: st.just(1) if k == "v" else _made(s, defs) for k, s in schema.get("properties", {}).items()}
    if not fields:
        rest = schema.get("additionalProperties", True)
        values = _made(rest, defs) if isinstance(rest, dict) else JUNK
        keys = st.integers(0, 1000).map(str) | st.text(TEXT, max_size=MOST_CHARACTERS)
        return st.dictionaries(keys, values, max_size=MOST_ITEMS)
    needed = set(schema.get("required", ()))
    optional = {k: s for k, s in fields.items() if k not in needed}
    return st.fixed_dictionaries({k: s for k, s in fields.items() if k in needed}, optional=optional)


def _array(schema: Schema, defs: Schema) -> st.SearchStrategy[Any]:
    least = schema.get("minItems", 0)
    most = min(schema.get("maxItems", MOST_ITEMS), least + MOST_ITEMS)
    return st.lists(_made(schema.get("items", {}), defs), min_size=least, max_size=most)


def _string(schema: Schema, _: Schema) -> st.SearchStrategy[Any]:
    least = schema.get("minLength", 0)
    most = min(schema.get("maxLength", MOST_CHARACTERS), least + MOST_CHARACTERS)
    if schema.get("format") == "binary":
        return st.binary(min_size=least, max_size=most) | st.just(bytes(min(16, most)))
    if "pattern" in schema:
        return st.from_regex(schema["pattern"])
    return st.text(TEXT, min_size=least, max_size=most)


def _integer(schema: Schema, _: Schema) -> st.SearchStrategy[Any]:
    least, most = schema.get("minimum", -(2**63)), schema.get("maximum", 2**63 - 1)
    return st.integers(max(least, -(2**63)), min(most, 2**64 - 1))


def _number(schema: Schema, _: Schema) -> st.SearchStrategy[Any]:
    least, most = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    return st.floats(least, most, exclude_min="exclusiveMinimum" in schema, allow_nan=False, allow_infinity=False)


_MAKERS = {
    "object": _object, "array": _array, "string": _string, "integer": _integer, "number": _number,
    "boolean": lambda schema, defs: st.booleans(), "null": lambda schema, defs: st.none(),
}  # fmt: skip


def check_body(kind: type[Message], body: Any) -> bool:
    """True if it is a message: then it says the same again, and its encoding does not change any more."""
    formats = Format if issubclass(kind, Generate | Event) else [Format.MSGPACK]
    taken = False
    for format in formats:
        data = _written(body, format)
        try:
            message = decode(data, kind) if data is not None else None
        except RequestError as error:
            tellable(error)
            continue
        if message is None:
            continue
        taken = True
        for again in formats:
            written = encode(message, again)
            assert decode(written, kind) == message
            assert encode(decode(written, kind), again) == written
    return taken


def _written(body: Any, format: Format) -> bytes | None:
    """None for what cannot be said in JSON."""
    if format is Format.MSGPACK:
        packed: bytes = msgpack.packb(body, use_bin_type=True)
        return packed
    try:
        return json.dumps(body).encode()
    except TypeError:
        return None


KINDS_AND_BODIES = st.sampled_from(MESSAGE_TYPES).flatmap(lambda k: st.tuples(st.just(k), bodies(k) | nearly(k)))


@settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(KINDS_AND_BODIES)
def _any_body(made: tuple[type[Message], Any]) -> None:
    check_body(*made)


def check_bodies(data: bytes) -> None:
    """`data` makes hypothesis's choices."""
    _any_body.hypothesis.fuzz_one_input(data)  # type: ignore[attr-defined]  # which @given adds


def seeds_of_bodies() -> list[bytes]:
    return [bytes(64), bytes(range(256)) * 4]
