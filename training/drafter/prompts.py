"""Prompts made of templates and topics, in any number, always the same for a seed. No torch.

A tenth of all topics (texts and code included) is held out: evaluation prompts are about these alone, so they share no
topic, and hence no pair of template and topic, with what is trained on.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any, Literal

from shared.errors import ConfigError
from training.drafter.files import put

Split = Literal["train", "heldout"]

HELD_OUT = 10
"""One of so many topics."""
TEMPERATURES: dict[Split, tuple[float, ...]] = {"train": (0.0, 0.3, 0.7, 1.0), "heldout": (0.0, 0.7)}
"""Answers are spread evenly over these."""
_FOLLOWED, _IN_A_MANNER, _WITH_SYSTEM = 0.35, 0.3, 0.15
"""Shares of prompts."""
_TRIES = 50
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_LONGEST_TOPIC = 120
"""Characters of a topic's name; texts and code are named by how they begin."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation to be held with the target: `turns` are the user's."""

    kind: str
    template: str
    topics: tuple[str, ...]
    """Beginnings of what the template was filled with, as listed."""
    system: str
    turns: tuple[str, ...]
    temperature: float
    max_tokens: tuple[int, ...]
    """Of each answer."""
    seed: int


@dataclass(frozen=True)
class Material:
    """What prompts are made of. `topics`: by the name that kinds call them."""

    kinds: tuple[Mapping[str, Any], ...]
    fill: Mapping[str, Sequence[str]]
    topics: Mapping[str, Sequence[str]]
    blanks: Mapping[str, Sequence[str]]
    """Fills the braces in passages."""

    def of_split(self, about: str, split: Split) -> list[str]:
        """Topics of one list that a split may use. Which ones does not depend on the seed: reports stay comparable."""
        listed = self.topics[about]
        held = set(Random(about).sample(range(len(listed)), max(1, len(listed) // HELD_OUT)))
        return [topic for i, topic in enumerate(listed) if (i in held) == (split == "heldout")]


@cache
def material() -> Material:
    """The lists in `data`."""
    templates, passages = _toml("templates"), _toml("passages")
    topics = {**_toml("topics"), "passage": passages["passage"], "code": _toml("snippets")["code"]}
    return Material(tuple(templates["kind"]), templates["fill"], topics, passages["fill"])


def draw(split: Split, count: int, seed: int, shortest: int, longest: int) -> list[Prompt]:
    """The first `count` prompts of a split; more of them begin with the same ones.

    No text comes twice, as long as there are others. Answers get `shortest` to `longest` tokens.
    """
    source = material()
    rng = Random(f"{seed} {split}")
    seen: set[str] = set()
    prompts = []
    for number in range(count):
        for _ in range(_TRIES):
            prompt = _one(source, split, number, rng, shortest, longest)
            if prompt.turns[0] not in seen:
                break
        seen.add(prompt.turns[0])
        prompts.append(prompt)
    return prompts


def write(path: Path, prompts: Sequence[Prompt]) -> None:
    """One JSON object a line."""
    text = "".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
    put(path, lambda part: part.write_text(text, encoding="utf-8"))


def read(path: Path, count: int) -> list[Prompt]:
    """The first `count` prompts of a file. Raises ConfigError when it has fewer."""
    with path.open(encoding="utf-8") as lines:
        entries = [json.loads(line) for _, line in zip(range(count), lines, strict=False)]
    if len(entries) < count:
        raise ConfigError(f"{path} has {len(entries)} prompts, not {count}")
    lists = ("topics", "turns", "max_tokens")
    made: list[dict[str, Any]] = [{k: tuple(v) if k in lists else v for k, v in entry.items()} for entry in entries]
    return [Prompt(**fields) for fields in made]


def _one(source: Material, split: Split, number: int, rng: Random, shortest: int, longest: int) -> Prompt:
    kind = rng.choices(source.kinds, [k["weight"] for k in source.kinds])[0]
    template = rng.choice(kind["texts"])
    topics = rng.sample(source.of_split(kind["about"], split), 2)
    chosen = [_filled(topic, source.blanks, rng) if kind["about"] == "passage" else topic for topic in topics]
    names = {"topic": chosen[0], "other": chosen[1], kind["about"]: chosen[0]}
    fill = {
        **source.fill,
        "name": source.blanks["name"],
        "day": source.blanks["day"],
        "number": source.blanks["number"],
    }
    first = _filled(template, {**fill, **{name: [text] for name, text in names.items()}}, rng)
    if rng.random() < _IN_A_MANNER:
        first = f"{first} {rng.choice(source.fill['manner'])}" if "\n" not in first else first
    turns = [first]
    if kind.get("follow_up") and rng.random() < _FOLLOWED:
        turns.append(rng.choice(source.fill["code_follow_up" if kind["name"] == "code" else "follow_up"]))
    temperatures = TEMPERATURES[split]
    return Prompt(
        kind=kind["name"],
        template=template,
        topics=tuple(topic[:_LONGEST_TOPIC] for topic in topics[: 1 + ("{other}" in template)]),
        system=rng.choice(source.fill["system"]) if rng.random() < _WITH_SYSTEM else "",
        turns=tuple(turns),
        temperature=temperatures[number % len(temperatures)],
        max_tokens=tuple(rng.randint(shortest, longest) for _ in turns),
        seed=rng.getrandbits(48),
    )


def _filled(text: str, choices: Mapping[str, Sequence[str]], rng: Random) -> str:
    """The same placeholder gets the same filling everywhere in `text`; what was filled in is not looked at again."""
    fillings: dict[str, str] = {}

    def filling(match: re.Match[str]) -> str:
        name = match[1]
        if name not in fillings:
            fillings[name] = rng.choice(choices[name])
        return fillings[name]

    return _PLACEHOLDER.sub(filling, text)


def _toml(name: str) -> dict[str, Any]:
    return tomllib.loads(files("training.drafter").joinpath(f"data/{name}.toml").read_text(encoding="utf-8"))
