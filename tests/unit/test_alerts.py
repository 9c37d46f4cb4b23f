"""deploy/grafana/alerts.yaml: rules that Prometheus loads, over metrics and labels that gateways tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "grafana"
ALERTS = yaml.safe_load((FOLDER / "alerts.yaml").read_text("utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
GATEWAY = sorted((ROOT / "services" / "gateway").glob("*.py"))
TOLD = "".join(path.read_text("utf-8") for path in GATEWAY if path.name.endswith("metrics.py"))
SAID = "".join(path.read_text("utf-8") for path in [*GATEWAY, ROOT / "shared" / "errors.py"])
ENDS = re.compile("_(total|count|sum|bucket)$")


def selectors(node: Any) -> list[Any]:
    """Of a parsed query, all that name a metric."""
    found = [node] if isinstance(node, promql_parser.VectorSelector) else []
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if (below := getattr(node, name, None)) is not None:
            found += selectors(below)
    return found + [one for argument in getattr(node, "args", None) or () for one in selectors(argument)]


def test_the_file_is_groups_of_rules() -> None:
    assert set(ALERTS) == {"groups"} and all(set(group) == {"name", "rules"} for group in ALERTS["groups"])
    names = [rule["alert"] for rule in RULES]
    assert 6 <= len(set(names)) == len(names) <= 10
    assert yaml.safe_load((FOLDER / "prometheus.yml").read_text("utf-8"))["rule_files"] == ["alerts.yaml"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_a_rule_asks_for_what_gateways_tell(rule: dict[str, Any]) -> None:
    assert {"alert", "expr", "labels", "annotations"} <= set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"\d+m", rule.get("for", "0m"))
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description"}
    named = selectors(promql_parser.parse(rule["expr"]))
    assert named
    for selector in named:
        assert f'"{ENDS.sub("", selector.name)}"' in TOLD, selector.name
        for matcher in selector.matchers.matchers:
            assert f'"{matcher.name}"' in TOLD, f"{selector.name} has no {matcher.name}"
            for value in matcher.value.split("|"):
                assert f'"{value}"' in SAID, f"no {matcher.name} is {value}"
    for metric in re.findall(r"trine_[a-z_]+[a-z]", str(rule)):
        assert f'"{ENDS.sub("", metric)}"' in TOLD, metric
    told = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    kept = set(re.findall(r"\w+", " ".join(re.findall(r"^(?:sum|max) by \(([^)]*)\)", rule["expr"]))))
    assert told <= kept | ({"model"} if "sum by (le, model)" in rule["expr"] else set())
