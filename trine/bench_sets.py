"""Prompts that ship, always the same: chat, RAG, agent, code, long. Pure, but for reading the package's own files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).parent / "data/texts"
LONG_CHARACTERS = 4800
"""About 1,100 tokens of English."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One chat turn. An empty `system` is left out."""

    user: str
    system: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.user}]


def prompts(name: str, seed: int) -> Iterator[Prompt]:
    """Without end, in an order that `seed` decides. `name` is one of SETS.

    In `rag` and `agent` many requests share a long beginning, as they do in use: a prefix cache can show what it saves.
    Those of the other sets begin with a number of their own, so that no two of them share a block.
    """
    rng = random.Random(f"{name} {seed}")
    yield from SETS[name](rng)


def _chat(rng: random.Random) -> Iterator[Prompt]:
    """Open questions of a sentence or two."""
    return (Prompt(f"({number}) {text}") for number, text in _endless(rng, _data("chat.json")["prompts"]))


def _rag(rng: random.Random) -> Iterator[Prompt]:
    """Questions over two passages; the same passages come again."""
    rag = _data("rag.json")
    asks = [
        Prompt(
            question, "\n\n".join([rag["instruction"], *(f"Passage {i}:\n{_text(n)}" for i, n in enumerate(names, 1))])
        )
        for names in rag["contexts"]
        for name in names
        for question in rag["questions"][name]
    ]
    return (ask for _, ask in _endless(rng, asks))


def _agent(rng: random.Random) -> Iterator[Prompt]:
    """Tasks for one list of tools."""
    agent = _data("agent.json")
    system = "\n".join([agent["instruction"], *map(json.dumps, agent["tools"])])
    return (Prompt(task, system) for _, task in _endless(rng, agent["tasks"]))


def _code(rng: random.Random) -> Iterator[Prompt]:
    """Small changes to short pieces of Python: most of the answer stands in the prompt."""
    edit = _data("edit.json")
    for number, ask in _endless(rng, edit["edits"]):
        code = "\n".join(["```python", *ask["code"], "```"])
        yield Prompt("\n\n".join([f"({number}) {edit['instruction']}", ask["task"], code]))


def _long(rng: random.Random) -> Iterator[Prompt]:
    """About 1,100 tokens of text, and a question about it."""
    paragraphs = _paragraphs()
    for number in count(1):
        text = f"{rng.randrange(10**6)}-{number} is the number of this reading.\n\n"
        text += "\n\n".join(rng.sample(paragraphs, len(paragraphs)))
        yield Prompt(f"{text[:LONG_CHARACTERS]}\n\nWhat is this text about? Answer in a few sentences.")


SETS: Mapping[str, Callable[[random.Random], Iterator[Prompt]]] = {
    "chat": _chat,
    "rag": _rag,
    "agent": _agent,
    "code": _code,
    "long": _long,
}


def _endless(rng: random.Random, items: list[Any]) -> Iterator[tuple[str, Any]]:
    """All items in a random order, then all in another one; each with a text that is its own."""
    for turn in count(1):
        for item in rng.sample(items, len(items)):
            yield f"{rng.randrange(10**6)}-{turn}", item


def _text(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text(encoding="utf-8").strip()


@cache
def _paragraphs() -> tuple[str, ...]:
    texts = (path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.txt")))
    return tuple(line for text in texts for line in text.split("\n") if line)


def _data(name: str) -> Any:
    return json.loads((TEXTS / name).read_text(encoding="utf-8"))
