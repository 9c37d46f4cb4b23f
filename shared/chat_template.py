"""A model's own chat template: Jinja in a sandbox, with the helpers that `transformers` gives to templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidField, ModelError


class ChatTemplate:
    """Renders messages to the text the model was trained on. Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        """`special_tokens` are the template's variables `bos_token`, `eos_token` and so on.

        Raises ModelError when the template does not compile.
        """
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile: {error.message} (line {error.lineno})") from None
        self._special_tokens = dict(special_tokens)
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        self.literals = "\0".join(texts)
        """All text the template writes itself."""
        self.tells_tools = any(node.name == "tools" for node in tree.find_all(nodes.Name))
        """Whether it tells the model of tools."""
        reads = {node.attr for node in tree.find_all(nodes.Getattr)}
        self.tells_calls = "tool_calls" in reads or "tool_calls" in texts
        """Whether it shows calls that were made earlier."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The conversation's text up to where the assistant's answer begins. Messages and tools are as in OpenAI's API,
        but for a call's arguments, which are an object.

        Raises InvalidField for `messages` with the template's own words when it refuses them.
        """
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except TemplateError as error:
            raise InvalidField(f"the model's chat template refuses: {error.message}", field="messages") from None
        except Exception as error:  # a template is a program and may fail in any way on messages it was not made for
            reason = f"{type(error).__name__}: {error}"
            raise InvalidField(f"the model's chat template fails: {reason:.200}", field="messages") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, **options: Any) -> str:
    """Jinja's own filter escapes HTML."""
    allowed = {key: options[key] for key in ("indent", "separators", "sort_keys") if key in options}
    return json.dumps(value, ensure_ascii=bool(options.get("ensure_ascii", False)), **allowed)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
