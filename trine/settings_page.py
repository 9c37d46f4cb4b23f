"""The page of all settings, printed from the code: each variable, its default, what it means, who reads it.

python -m trine.settings_page > docs/settings.md
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from shared.config import Settings

READERS = {
    "Prefill workers": "services.prefill.config:PrefillSettings",
    "Decode workers": "services.decode.config:DecodeSettings",
    "Drafters": "services.drafter.config:DrafterSettings",
    "The gateway": "services.gateway.config:GatewaySettings",
    "Clients": "trine.client:ClientSettings",
}
"""By name, not imported from here: the command line stands on neither the gateway nor the workers."""
OTHERS = {
    "TRINE_CACHE_DIR": (
        "`$XDG_CACHE_HOME/trine`, else `~/.cache/trine`",
        "Where converted weights are kept. Read by whatever loads a model.",
    ),
    "TRINE_TENANTS": (
        "default",
        "Names, separated by commas: whom `python -m trine.credentials` makes passwords and API keys for.",
    ),
}
"""Variables that are no field of a settings class: default and meaning."""
INTRODUCTION = """\
# Settings

Printed from the code by `python -m trine.settings_page`; a test compares.

Each setting is an environment variable and has the same name everywhere: `TRINE_BLOCK_SIZE` in the environment and in
compose is `--block-size` on the command line, where a command has it. Flags come first. A value that cannot be is
refused before anything starts, with the variable's name. Those with a ° are the same for all workers of a model.
Variables of the shipped NATS configuration are in [security](security.md) and [cluster](cluster.md).
"""
SHARED_BY_ALL = frozenset(
    {
        *("block_size", "kv_codec", "weights", "model", "model_name", "public_prefixes"),
        *("nats_replicas", "cache_bytes", "max_queued", "ack_wait_s"),  # of streams and consumers, which all share
    }
)


@dataclass(frozen=True, slots=True)
class Row:
    variable: str
    default: str
    values: str
    meaning: str


def page() -> str:
    """Markdown."""
    parts = [INTRODUCTION, _section("Every process", rows(Settings))]
    for title, where in READERS.items():
        module, name = where.split(":")
        parts.append(_section(title, rows(getattr(import_module(module), name))))
    others = [Row(variable, default, "", meaning) for variable, (default, meaning) in OTHERS.items()]
    parts.append(_section("Others", others))
    return "\n".join(parts)


def rows(kind: type[Settings]) -> list[Row]:
    """What this class has itself, without what it inherits."""
    meanings = _docstrings(kind)
    return [
        Row(_variable(name), _default(name, field), _values(field), _meaning(meanings.get(name, ""), kind))
        for name, field in kind.model_fields.items()
        if name in kind.__annotations__
    ]


def _variable(name: str) -> str:
    return f"TRINE_{name.upper()}" + ("°" if name in SHARED_BY_ALL else "")


def _section(title: str, found: list[Row]) -> str:
    lines = [f"## {title}", "", "| variable | unless given | values | |", "|---|---|---|---|"]
    lines += [f"| `{_code(row.variable)} | {row.default} | {row.values} | {_cell(row.meaning)} |" for row in found]
    return "\n".join([*lines, ""])


def _code(variable: str) -> str:
    return f"{variable.removesuffix('°')}`" + ("°" if variable.endswith("°") else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _meaning(text: str, kind: type[Settings]) -> str:
    """As it stands beside the code, with other settings and pages named as they are here."""
    for name in kind.model_fields:
        text = text.replace(f"`{name}`", f"`TRINE_{name.upper()}`")
    return re.sub(r"docs/([a-z-]+)\.md", r"[\1](\1.md)", text)


def _default(name: str, field: FieldInfo) -> str:
    value = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
    if value == "" or value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and name.endswith("_bytes") and value % (1 << 20) == 0:
        return f"{value} ({value >> 20} MiB)"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _values(field: FieldInfo) -> str:
    """Choices and bounds."""
    kind = field.annotation
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if kind is bool:
        return "`true`, `false`"
    low, high = _bound(field, "ge", "gt"), _bound(field, "le", "lt")
    if low and high:
        return f"{low[1]} to {high[1]}"
    if low:
        return f"{'above' if low[0] == 'gt' else 'at least'} {low[1]}"
    return ""


def _bound(field: FieldInfo, *names: str) -> tuple[str, str] | None:
    for limit in field.metadata:
        for name in names:
            if (value := getattr(limit, name, None)) is not None:
                return name, f"{value:g}" if isinstance(value, float) else f"{value}"
    return None


def _docstrings(kind: type[Any]) -> dict[str, str]:
    """Of a class's fields: the text below each."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    return dict(_described(tree.body))


def _described(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for node, below in pairwise(body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            yield node.target.id, " ".join(below.value.value.split())


if __name__ == "__main__":
    print(page(), end="")
