"""Settings as a worker will read them, checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from shared.config import Settings
from shared.errors import ConfigError

S = TypeVar("S", bound=Settings)


def checked(kind: type[S], env: Mapping[str, str]) -> S:
    """What a process with `env` on top of this one's environment will read. Raises ConfigError naming the variable."""
    given: dict[str, Any] = {name.removeprefix("TRINE_").lower(): value for name, value in env.items()}
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise ConfigError(f"TRINE_{str(first['loc'][0]).upper()}: {first['msg']}") from None


def variables(given: Mapping[str, object]) -> dict[str, str]:
    """Environment variables of the settings that were given: None and "" were not."""
    return {f"TRINE_{name.upper()}": str(value) for name, value in given.items() if value not in (None, "")}
