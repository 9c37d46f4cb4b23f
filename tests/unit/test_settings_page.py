"""docs/settings.md says what the code reads."""

from __future__ import annotations

import re
from pathlib import Path

from shared.config import Settings
from trine.settings_page import OTHERS, READERS, page, rows

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == page(), "python -m trine.settings_page > docs/settings.md"


def test_every_variable_is_there_and_has_a_meaning() -> None:
    told = set(re.findall(r"^\| `(TRINE_[A-Z0-9_]+)`", page(), re.MULTILINE))
    read = {
        variable
        for folder in ("shared", "services", "trine", "deploy")
        for path in (ROOT / folder).rglob("*.py")
        for variable in re.findall(r"(?:environ|getenv|envvar|TRINE_)\W*(TRINE_[A-Z0-9_]+)", path.read_text())
    }
    assert read - told == set()
    assert all(row.meaning for row in rows(Settings))
    assert all(re.search(rf"^## {title}$", page(), re.MULTILINE) for title in READERS)
    assert set(OTHERS) <= told
    assert all(line.rstrip(" |").count("|") > 3 for line in page().splitlines() if line.startswith("| `")), "no meaning"
