"""docs/operations.md and docs/choosing.md name only what there is: settings, commands, error codes, counters, files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from shared import errors
from trine.cli import app

ROOT = Path(__file__).resolve().parents[2]
GUIDES = [ROOT / "docs" / name for name in ("operations.md", "choosing.md")]
SOURCES = "\n".join(
    path.read_text("utf-8")
    for folder, kind in (
        ("services", "*.py"),
        ("shared", "*.py"),
        ("trine", "*.py"),
        ("deploy", "*.conf"),
        ("deploy", "*.y*ml"),
        ("", "*.yaml"),
    )
    for path in ((ROOT / folder).rglob(kind) if folder else ROOT.glob(kind))
)
METRICS = set(
    re.findall(
        r'"(trine_[a-z_]+)"',
        "".join(path.read_text("utf-8") for path in (ROOT / "services" / "gateway").glob("*metrics.py")),
    )
)
METRIC_END = re.compile("_(total|bucket|count|sum)$")
SETTINGS = set(re.findall(r"`(TRINE_[A-Z_]+)`", (ROOT / "docs" / "settings.md").read_text("utf-8")))


def said(guide: Path, pattern: str) -> set[str]:
    return set(re.findall(pattern, guide.read_text("utf-8")))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_what_it_names_exists(guide: Path) -> None:
    assert said(guide, r"(TRINE_[A-Z_]+[A-Z])(?![<_])") <= SETTINGS
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert said(guide, r"`trine ([a-z]+)") <= set(commands)
    known = {kind.code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "code")}
    for name in said(guide, r"`([a-z]+_[a-z_]+)`"):
        assert name in known or name in SOURCES or METRIC_END.sub("", name) in METRICS, name
    for name in said(guide, r"`(trine_[a-z_]+)"):
        assert METRIC_END.sub("", name) in METRICS, name
    for target in said(guide, r"\]\(([a-z-]+\.md)"):
        assert (ROOT / "docs" / target).exists(), target
    for module in said(guide, r"python -m ([a-z._]+[a-z])"):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), module


def headings(page: Path) -> set[str]:
    found = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_links_inside_pages_lead_somewhere(guide: Path) -> None:
    for page, anchor in re.findall(r"\]\(([a-z-]*(?:\.md)?)#([\w-]+)\)", guide.read_text("utf-8")):
        target = ROOT / "docs" / page if page else guide
        assert anchor in headings(target), f"{target.name}#{anchor}"
