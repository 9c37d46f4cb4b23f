"""Writes docs/protocol-reference.md and docs/asyncapi.yaml from the code: `python -m trine.reference [--check]`.

A test compares them with the code. docs/protocol.md is what people read first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trine.reference_asyncapi import asyncapi
from trine.reference_channels import MADE_BY
from trine.reference_page import page

DOCS = Path(__file__).resolve().parents[1] / "docs"


def files() -> dict[Path, str]:
    """What belongs into each file."""
    import yaml  # of the extra `dev`

    text = yaml.safe_dump(asyncapi(), sort_keys=False, allow_unicode=True, width=120)
    return {DOCS / "protocol-reference.md": page(), DOCS / "asyncapi.yaml": f"# {MADE_BY}\n{text}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    check = parser.parse_args().check
    old = {path: text for path, text in files().items() if not path.exists() or path.read_text("utf-8") != text}
    for path, text in old.items():
        print(f"{path.name} is out of date" if check else f"wrote docs/{path.name}")
        if not check:
            path.write_text(text, "utf-8")
    sys.exit(1 if check and old else 0)


if __name__ == "__main__":
    main()
