"""Prompts of the prefix benchmark, always the same, and what a cache that forgets nothing could save of them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from shared.messages import ChatMessage
from shared.tokenizer import Tokenizer

TEXTS = Path(__file__).parents[1] / "trine/data/texts"


@dataclass(frozen=True, slots=True)
class Ask:
    """A chat request; those of one `group` begin with the same long text."""

    group: int
    system: str
    user: str

    @property
    def messages(self) -> list[ChatMessage]:
        return [ChatMessage(role="system", content=self.system), ChatMessage(role="user", content=self.user)]


def rag_set() -> list[Ask]:
    """40 questions over 5 contexts, mixed: two passages each, and eight questions, four about either passage."""
    rag = _data("rag.json")
    left = {name: list(questions) for name, questions in rag["questions"].items()}
    asks = []
    for group, names in enumerate(rag["contexts"]):
        passages = [f"Passage {number}:\n{_passage(name)}" for number, name in enumerate(names, 1)]
        system = "\n\n".join([rag["instruction"], *passages])
        for name in names:
            asks += [Ask(group, system, question) for question in left[name][:4]]
            del left[name][:4]
    random.Random(5).shuffle(asks)
    return asks


def agent_set() -> list[Ask]:
    """40 tasks for one list of tools."""
    agent = _data("agent.json")
    system = "\n".join([agent["instruction"], *map(json.dumps, agent["tools"])])
    return [Ask(0, system, task) for task in agent["tasks"]]


def reading(tokenizer: Tokenizer, number: int, size: int) -> str:
    """A raw prompt of exactly `size` tokens; two numbers have no block in common, as their first ones differ."""
    for attempt in count():
        order = random.Random(f"{number} {attempt}")
        text = f"Reading number {number}.\n"
        while len(tokens := tokenizer.encode(text)) < size:
            text += "\n" + "\n".join(order.sample(_paragraphs(), len(_paragraphs())))
        text = tokenizer.decode(tokens[:size])
        if len(tokenizer.encode(text)) == size:  # else it was cut where the tokenizer sees another token
            return text
    raise AssertionError("unreachable")


def best_share(prompts: Sequence[Sequence[int]], block_size: int) -> float:
    """The share of these prompts' tokens that came earlier, in this order, as far as whole blocks can tell.

    As everywhere, the last token of a prompt is computed each time.
    """
    known: set[tuple[int, ...]] = set()
    cached = 0
    for prompt in prompts:
        blocks = [tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)]
        cached += max((len(block) for block in blocks if block in known and len(block) < len(prompt)), default=0)
        known.update(blocks)
    return cached / sum(map(len, prompts))


def _passage(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text(encoding="utf-8").strip()


@cache
def _paragraphs() -> tuple[str, ...]:
    texts = (path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.txt")))
    return tuple(line for text in texts for line in text.split("\n") if line)


def _data(name: str) -> Any:
    return json.loads((TEXTS / name).read_text(encoding="utf-8"))
