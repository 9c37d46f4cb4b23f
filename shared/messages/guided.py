"""What form an answer must have.

The bounds are those of what may be asked for. Whether a worker can see to it, it says when it compiles the form.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from shared.messages.json_schema import check_json_schema, check_pattern

MAX_GUIDED = 64 << 10
"""Bytes of a whole form, as JSON."""
MAX_SCHEMA_DEPTH = 32
"""Levels of objects and lists in a JSON schema."""
MAX_SCHEMA_VALUES = 4096
"""Values in a JSON schema, objects and lists included."""
MAX_REGEX = 2048
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 4096
MAX_GRAMMAR = 32 << 10
MAX_RULES = 1024
MAX_TAGS = 64
MAX_TAG_CHARS = 256
KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "tags")


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [schema]
    depth = values = 0
    while level:
        values += len(level)
        if values > MAX_SCHEMA_VALUES:
            raise ValueError(f"more than {MAX_SCHEMA_VALUES} values")
        for value in level:
            _check_value(value)
        within = [value for value in level if isinstance(value, dict | list)]
        if depth == MAX_SCHEMA_DEPTH and within:
            raise ValueError(f"nested deeper than {MAX_SCHEMA_DEPTH} levels")
        level = [inner for outer in within for inner in (outer.values() if isinstance(outer, dict) else outer)]
        depth += 1
    return schema


def _supported(schema: dict[str, Any]) -> dict[str, Any]:
    check_json_schema(schema)
    return schema


def _check_value(value: Any) -> None:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("the names in a JSON schema are strings")
    elif isinstance(value, float):
        if value - value != 0:
            raise ValueError("a number is not finite")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError("a whole number has more than 64 bits")
    elif not (value is None or isinstance(value, str | list)):
        raise ValueError(f"{type(value).__name__} is not a JSON value")


def _plain(pattern: str) -> str:
    check_pattern(pattern)
    return pattern


def _few_rules(grammar: str) -> str:
    if (rules := grammar.count("::=")) > MAX_RULES:
        raise ValueError(f"{rules} rules; at most {MAX_RULES} are accepted")
    return grammar


JsonObject = Annotated[dict[str, Any], AfterValidator(_bounded)]
"""Any object of JSON values, of no more than is good for us."""
JsonSchema = Annotated[JsonObject, AfterValidator(_supported)]
_TagText = Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARS)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Tag(_Part):
    """`begin`, then JSON that fits the schema, then `end`."""

    begin: _TagText
    json_schema: JsonSchema
    end: _TagText


class Tags(_Part):
    """Free text in which each of the `triggers` begins one of the `tags`: calls of tools, for example."""

    triggers: Annotated[list[_TagText], Field(min_length=1, max_length=MAX_TAGS)]
    tags: Annotated[list[Tag], Field(min_length=1, max_length=MAX_TAGS)]
    required: bool = False
    """The answer begins with a tag."""
    single: bool = False
    """The answer ends with its first tag."""

    @model_validator(mode="after")
    def _one_trigger_each(self) -> Tags:
        for tag in self.tags:
            if sum(tag.begin.startswith(trigger) for trigger in self.triggers) != 1:
                raise ValueError("each tag begins with exactly one of the triggers")
        return self


class Guided(_Part):
    """The form of an answer, control tokens aside: exactly one of these."""

    json_schema: JsonSchema | None = None
    """JSON that fits this schema, properties in its order and no others than it names."""
    json_object: Literal[True] | None = None
    """Any JSON object."""
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX), AfterValidator(_plain)] | None = None
    """All of the answer matches it."""
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_CHARS)]],
            Field(min_length=1, max_length=MAX_CHOICES),
        ]
        | None
    ) = None
    """One of these texts."""
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR), AfterValidator(_few_rules)] | None = None
    """What rule `root` of this grammar gives, written in GBNF (llama.cpp's EBNF)."""
    tags: Tags | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Guided:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(KINDS)}")
        if (size := len(self.canonical.encode())) > MAX_GUIDED:
            raise ValueError(f"{size} bytes; at most {MAX_GUIDED} are accepted")
        return self

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def canonical(self) -> str:
        """JSON, the same for the same form: names keep their order, which is that of the answer."""
        value = getattr(self, self.kind)
        plain = value.model_dump() if isinstance(value, BaseModel) else value
        return json.dumps([self.kind, plain], ensure_ascii=False, allow_nan=False, separators=(",", ":"))
