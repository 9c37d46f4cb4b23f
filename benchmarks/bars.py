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


def tabled(result: Mapping[str, Any]) -> list[str]:
    """Lines for "rows", tables of names and numbers, and for "bars", as `judged` gives them."""
    lines = []
    for name, row in result["rows"].items():
        lines.append(name)
        lines += [f"  {key:<32}{value:>10.3f}" for key, value in row.items()]
    lines.append("")
    for name, bar in result["bars"].items():
        verdict = "" if bar["passed"] else "  MISSED"
        lines.append(f"{name:<34}{bar['value']:>10.3f}  bar {bar['bar']}{verdict}")
    return lines
