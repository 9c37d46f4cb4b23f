"""How the report's pictures look, light and dark, and what their rows are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Theme:
    """`quiet`: what is there to compare with."""

    name: str
    paper: str
    ink: str
    quiet: str
    colors: tuple[str, ...]

    @property
    def style(self) -> Any:
        """matplotlib's settings, by its names of them."""
        return {
            "svg.hashsalt": "trine",
            "font.size": 9,
            "figure.facecolor": self.paper,
            "savefig.facecolor": self.paper,
            "axes.facecolor": self.paper,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), self.ink),
            **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), self.quiet),
        }


THEMES = (
    Theme("light", "#ffffff", "#24292f", "#b4bac2", ("#2a78d6", "#d9662b", "#168f64", "#8250c4")),
    Theme("dark", "#0d1117", "#d9dee4", "#5b646f", ("#5a9cf0", "#f08a56", "#35b98a", "#a982e6")),
)

LABELS: Mapping[str, str] = {
    "1,024 tokens, same_worker": "1,024 tokens,\nthe worker's own pool",
    "1,024 tokens, host_tier": "1,024 tokens,\nthe machine's memory",
    "1,024 tokens, nats": "1,024 tokens,\nNATS",
    "rag, 40 requests": "questions over\nthe same documents",
    "agent, 40 requests": "tasks for\nthe same tools",
    "quote, batch 1": "quotations",
    "edit, batch 1": "edits of code",
    "chat, batch 1": "open chat",
    "chat, batch 8": "8 open chats at once",
    "useless drafter, batch 1": "a useless drafter",
    "control: neither has a drafter": "no drafter on either side",
}
