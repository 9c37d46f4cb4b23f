"""What a benchmark's results have to reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Bars = Mapping[str, tuple[str, float]]
"""Name of a result: (">=" or "<=", the bar)."""


def judged(result: Mapping[str, Any], bars: Bars) -> dict[str, dict[str, Any]]:
    """By name of a bar: the value, the bar, and whether it is met."""
    return {
        name: {
            "value": (value := result[name]),
            "bar": f"{sign} {bar}",
            "passed": value >= bar if sign == ">=" else value <= bar,
        }
        for name, (sign, bar) in bars.items()
    }
