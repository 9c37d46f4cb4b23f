"""docs/files.md has every source file, with what it says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from trine.file_map import FOLDERS, ROOT, files, page, sentence

WITHOUT_A_PAGE = {"tests"}
"""Top folders whose files are told by their names."""


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "files.md").read_text() == page(), "python -m trine.file_map > docs/files.md"


def test_every_folder_with_source_files_is_there() -> None:
    told = page()
    for top in (path for path in ROOT.iterdir() if path.is_dir() and path.name.isidentifier()):
        for folder in {path.parent for path in top.rglob("*.py")} if top.name not in WITHOUT_A_PAGE else set():
            name = folder.relative_to(ROOT).as_posix()
            assert name in FOLDERS or not files(folder), name
            assert all(f"| `{path.name}` | " in told for path in files(folder))


def test_the_first_sentence_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""Reads `a|b`, e.g. the\nfirst. Then\n\nmore."""\n')
    assert sentence(file) == "Reads `a\\|b`, e.g. the first."
    file.write_text("x = 1\n")
    with pytest.raises(ValueError, match="does not say"):
        sentence(file)
