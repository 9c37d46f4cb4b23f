"""A model of a few thousand weights, what is asked of it, and what it answers where nothing goes wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.engine.engine import Engine
from shared.sampling.stopping import Completion
from shared.tokenizer import Tokenizer
from tests.chaos.oracle import Expected
from tests.one_worker import OneWorker
from tests.tiny_recipe import write_target

BLOCK_SIZE = 16
PREFIXES, QUESTIONS = 4, 36
STOP_CHARS = 9
WORDS = range(3, 259)
"""Ids below are special."""


@dataclass(frozen=True)
class Case:
    """A question and its right answer."""

    token_ids: tuple[int, ...]
    options: dict[str, Any]
    """As `Client.stream` takes them."""
    expected: Expected


def write_model(folder: Path) -> Path:
    write_target(folder)
    return folder


def cases(folder: Path, seed: int) -> list[Case]:
    """Those answers that hang on a rounding error are left out: they differ with what else is computed beside them."""
    engine, tokenizer = Engine.load(folder, block_size=BLOCK_SIZE, kv_blocks=1024, threads=1), Tokenizer.load(folder)
    rng = random.Random(seed)
    asked = questions(rng)
    together = [answer.tokens for answer in OneWorker(engine).run(asked)]
    alone = [OneWorker(engine).run([question])[0].tokens for question in asked]
    found = []
    for question, tokens, again in zip(asked, together, alone, strict=True):
        if tokens == again:
            found.append(case_of(question, tokens, engine.info.eos_ids, tokenizer))
            found += _stopped(found[-1], engine.info.eos_ids, tokenizer)
    return found


def questions(rng: random.Random) -> list[dict[str, Any]]:
    """Prompts that begin alike, greedy and not."""
    prefixes = [_words(rng, rng.randrange(40, 200)) for _ in range(PREFIXES)]
    return [
        {
            "token_ids": rng.choice(prefixes) + _words(rng, rng.randrange(1, 40)),
            "max_tokens": rng.choice((20, 60, 150, 300)),
            "seed": rng.randrange(1 << 31),
            "temperature": rng.choice((0.0, 0.0, 0.7, 1.2)),
            "top_p": rng.choice((1.0, 0.9)),
        }
        for _ in range(QUESTIONS)
    ]


def _words(rng: random.Random, count: int) -> list[int]:
    return [rng.choice(WORDS) for _ in range(count)]


def case_of(question: dict[str, Any], tokens: Sequence[int], eos: frozenset[int], tokenizer: Tokenizer) -> Case:
    """The answer as the tokens make it: cut where a stop string of the question says."""
    stops = [question["stop"]] if "stop" in question else []
    completion = Completion(tokenizer.detokenizer(), eos, stops, question["max_tokens"])
    said, reason = 0, None
    while reason is None:
        reason = completion.push(tokens[said]).finished
        said += 1
    options = {name: value for name, value in question.items() if name != "token_ids"}
    prompt = tuple(question["token_ids"])
    # Who cancels after the last token has all of the answer, and a stop string is no part of it.
    cut = (*(tokenizer.decode(tokens[:count]) for count in range(said)), completion.text)
    expected = Expected(len(prompt), tuple(tokens[:said]), completion.text, reason, question["seed"], cut)
    return Case(prompt, options, expected)


def _stopped(case: Case, eos: frozenset[int], tokenizer: Tokenizer) -> list[Case]:
    """The same question with a stop string from the middle of its answer."""
    text = case.expected.text
    if len(text) < 4 * STOP_CHARS:
        return []
    stop = text[len(text) // 2 :][:STOP_CHARS]
    question = {"token_ids": list(case.token_ids), **case.options, "stop": stop}
    stopped = case_of(question, case.expected.token_ids, eos, tokenizer)
    return [replace(stopped, options={**case.options, "stop": stop})]
