"""What of JSON Schema (2020-12) an answer can be held to. What else a schema asks for is refused, not passed over.

By what the compiler of forms (xgrammar 0.2.9) was seen to do; titles, defaults and other annotations ask for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_NEVER = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_ASSERTIONS = frozenset(
    (
        "type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "multipleOf", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "format", "items", "prefixItems",
        "minItems", "maxItems", "unevaluatedItems", "properties", "required", "additionalProperties",
        "patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties",
    )
)  # fmt: skip
_ALONE = {
    "$ref": frozenset(("$ref",)),
    "allOf": frozenset(("allOf",)),
    "anyOf": frozenset(("anyOf", "type")),
    "oneOf": frozenset(("oneOf", "type")),
    "enum": frozenset(("enum", "type")),
    "const": frozenset(("const", "type")),
}
"""Keywords that are only seen to without others beside them, but for these."""
_TELLING = frozenset(("type", *_ALONE, "properties", "additionalProperties", "items", "prefixItems"))
"""Where none of these is, nothing is seen to."""
_LOOKS = re.compile(r"\(\?(?!:)")


def check_json_schema(schema: dict[str, Any]) -> None:
    """Raises ValueError naming the first keyword, and its place, that an answer would not be held to.

    The schema is not too deep.
    """
    for place, node in _schemas("$", schema):
        if reason := _unseen(node):
            raise ValueError(f"{reason}, at {place[:200]}")


def check_pattern(pattern: object) -> None:
    """Raises ValueError for what would be passed over in a regular expression."""
    if isinstance(pattern, str) and _LOOKS.search(pattern):
        raise ValueError("groups with (? other than (?: are not supported in a regular expression")


def _unseen(node: dict[str, Any]) -> str:
    asserted = _ASSERTIONS & node.keys()
    for keyword in _NEVER:
        if keyword in node:
            return f"{keyword} is not supported"
    for keyword, beside in _ALONE.items():
        if keyword in node and (more := asserted - beside):
            return f"{keyword} beside {min(more)} is not supported"
    if asserted and not asserted & _TELLING:
        return f"{min(asserted)} needs a type beside it"
    return _unseen_reference(node) or _unseen_value(node) or _unseen_object(node)


def _unseen_reference(node: dict[str, Any]) -> str:
    reference, merged = node.get("$ref"), node.get("allOf")
    if reference is not None and not (isinstance(reference, str) and re.match("#($|/)", reference)):
        return "a $ref that does not begin with #/ is not supported"
    return "allOf of more than one is not supported" if isinstance(merged, list) and len(merged) != 1 else ""


def _unseen_value(node: dict[str, Any]) -> str:
    if node.get("uniqueItems"):
        return "uniqueItems is not supported"
    kinds = node.get("type")
    if "multipleOf" in node and "number" in (kinds if isinstance(kinds, list) else [kinds]):
        return "multipleOf is not supported for numbers that are not whole"
    if ("pattern" in node or "format" in node) and ("minLength" in node or "maxLength" in node):
        return "a length beside pattern or format is not supported"
    return ""


def _unseen_object(node: dict[str, Any]) -> str:
    required, properties, patterns = (node.get(k) for k in ("required", "properties", "patternProperties"))
    named = properties if isinstance(properties, dict) else {}
    if isinstance(required, list) and (more := [name for name in required if name not in named]):
        return f"required names {more[0]!r:.60}, which is not among the properties"
    try:
        for pattern in (node.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
            check_pattern(pattern)
    except ValueError as error:
        return str(error)
    return ""


def _schemas(place: str, node: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and those within it, each with its place."""
    if not isinstance(node, dict):
        return
    yield place, node
    for keyword in ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"):
        yield from _schemas(f"{place}.{keyword}", node.get(keyword))
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        within = node.get(keyword)
        for name, inner in within.items() if isinstance(within, dict) else ():
            yield from _schemas(f"{place}.{keyword}.{name:.60}", inner)  # else a long name would be copied to each
    for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
        within = node.get(keyword)
        for number, inner in enumerate(within if isinstance(within, list) else ()):
            yield from _schemas(f"{place}.{keyword}.{number}", inner)
