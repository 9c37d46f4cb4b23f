"""Chats of the speculation benchmark, always the same: quoting from a text, editing code, open questions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.messages import ChatMessage

TEXTS = Path(__file__).parents[1] / "trine/data/texts"


@dataclass(frozen=True, slots=True)
class Chat:
    user: str

    @property
    def messages(self) -> list[ChatMessage]:
        return [ChatMessage(role="user", content=self.user)]


def quote_set() -> list[Chat]:
    """Summaries and quotations of some paragraphs of a text: much of the answer stands in the prompt."""
    asks = _data("quote.json")["asks"]
    return [Chat(ask["task"].format(text=_paragraphs(ask["passage"], *ask["paragraphs"]))) for ask in asks]


def edit_set() -> list[Chat]:
    """Small changes to short pieces of Python: most of the answer stands in the prompt."""
    edit = _data("edit.json")
    return [
        Chat("\n\n".join([edit["instruction"], ask["task"], "\n".join(["```python", *ask["code"], "```"])]))
        for ask in edit["edits"]
    ]


def chat_set() -> list[Chat]:
    """Open questions: the answer stands nowhere."""
    return [Chat(prompt) for prompt in _data("chat.json")["prompts"]]


def _paragraphs(passage: str, start: int, end: int) -> str:
    text = (TEXTS / f"{passage}.txt").read_text(encoding="utf-8").strip()
    return "\n\n".join(text.split("\n\n")[start:end])


def _data(name: str) -> Any:
    return json.loads((TEXTS / name).read_text(encoding="utf-8"))
