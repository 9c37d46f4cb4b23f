"""Text that others wrote, for a terminal: nothing in it moves the cursor or changes a colour. Pure."""

from __future__ import annotations

import unicodedata

_KEPT = {"\n", "\t"}
_HARMFUL = {"Cc", "Cs", "Co"}
"""Control characters, and what no text has. Format characters stay: some scripts need them."""


def plain(text: str) -> str:
    """Control characters become U+FFFD."""
    return "".join("\ufffd" if c not in _KEPT and unicodedata.category(c) in _HARMFUL else c for c in text)


def name(text: str, most: int = 48) -> str:
    """A name on one line, cut when it is too long."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"
