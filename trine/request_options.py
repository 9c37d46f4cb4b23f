"""Options that say how to answer: `trine generate` and `trine chat` have all of them."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shared.errors import InvalidField

SAMPLING, FORM, REST = "How to choose tokens", "What form the answer has", "The request"


def _option(kind: Any, help: str, panel: str) -> Any:
    return Annotated[kind, typer.Option(help=help, rich_help_panel=panel)]


OPTIONS: Mapping[str, Any] = {
    "temperature": _option(float | None, "0 takes the most likely token (default 1).", SAMPLING),
    "top_k": _option(int | None, "Keep the k most likely tokens; 0: all.", SAMPLING),
    "top_p": _option(float | None, "Keep the likeliest tokens of this total probability.", SAMPLING),
    "min_p": _option(float | None, "Drop tokens below this share of the likeliest one.", SAMPLING),
    "seed": _option(int | None, "Same seed and prompt: same text.", SAMPLING),
    "repetition_penalty": _option(float | None, "Above 1: fewer tokens of prompt and answer again.", SAMPLING),
    "frequency_penalty": _option(float | None, "Per earlier use in the answer, -2 to 2.", SAMPLING),
    "presence_penalty": _option(float | None, "Once for any use in the answer, -2 to 2.", SAMPLING),
    "logit_bias": _option(
        list[str] | None, "TOKEN=BIAS: added to the logit of a token id, -100 to 100; several times.", SAMPLING
    ),
    "max_tokens": _option(int | None, "At most so many tokens.", SAMPLING),
    "min_tokens": _option(int | None, "At least so many tokens before the end.", SAMPLING),
    "stop": _option(list[str] | None, "End before this text; may be given several times.", SAMPLING),
    "json_schema": _option(Path | None, "A file: the answer is JSON that fits its schema.", FORM),
    "json_object": Annotated[
        bool, typer.Option("--json-object", help="The answer is a JSON object.", rich_help_panel=FORM)
    ],
    "regex": _option(str | None, "All of the answer matches it.", FORM),
    "choice": _option(list[str] | None, "The answer is one of these texts; several times.", FORM),
    "grammar": _option(Path | None, "A file: the answer is what this GBNF grammar gives.", FORM),
    "priority": Annotated[
        str,
        typer.Option(
            help="high, normal or low.", rich_help_panel=REST, autocompletion=lambda: ["high", "normal", "low"]
        ),
    ],
    "cache_salt": _option(str | None, "Share cached KV only with requests of the same salt.", REST),
    "timeout": _option(float | None, "Give up after so many seconds.", REST),
}
_DEFAULTS: Mapping[str, Any] = {"priority": "normal", "json_object": False}
_FORMS = ("json_schema", "json_object", "regex", "choice", "grammar")


def with_request_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with all of `OPTIONS` besides its own. What they ask for comes as `fields`, of `Client.stream`."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        asked = {name: given.pop(name) for name in OPTIONS}
        command(fields=request_fields(asked), **given)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "fields"]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=annotation)
        for name, annotation in OPTIONS.items()
    ]
    run.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *more)}
    return run


def request_fields(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of `OPTIONS`, as fields of a request. Raises InvalidField naming the option."""
    fields = {name: value for name, value in asked.items() if name not in _FORMS and value not in (None, [])}
    if (timeout := fields.pop("timeout", None)) is not None:
        fields["deadline_ms"] = max(1, round(timeout * 1e3))
    if (biases := fields.pop("logit_bias", None)) is not None:
        fields["logit_bias"] = _biases(biases)
    if (form := _form(asked)) is not None:
        fields["guided"] = form
    return fields


def _biases(given: Sequence[str]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in (each.split("=") for each in given)}
    except ValueError:
        raise InvalidField("--logit-bias: TOKEN=BIAS, such as 50256=-100", field="logit_bias") from None


def _form(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    given = {name: asked[name] for name in _FORMS if asked.get(name) not in (None, [], False)}
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidField(f"{names}: give one of them", field="guided")
    ((name, value),) = given.items()
    if name == "json_schema":
        return {name: _schema(value)}
    return {name: _text(value, name) if name == "grammar" else value}


def _schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(_text(path, "json-schema"))
    except json.JSONDecodeError as error:
        raise InvalidField(f"--json-schema: {path} is not JSON: {error}", field="guided") from None
    if not isinstance(schema, dict):
        raise InvalidField(f"--json-schema: {path} is not a JSON object", field="guided")
    return schema


def _text(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidField(f"--{option}: cannot read {path}: {reason}", field="guided") from None
