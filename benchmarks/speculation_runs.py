"""The speculation benchmark's measurements. They check that they measured what they say.

Two stacks take turns, request by request, so that a busy neighbour slows both: see `speculation_fleet`.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.prefix_fleet import require
from benchmarks.prefix_runs import say
from benchmarks.speculation_fleet import (
    DRAFTED,
    PLAIN,
    Answer,
    Drafter,
    How,
    Pair,
    Sides,
    drafter,
    stacks,
    useless,
)  # fmt: skip
from benchmarks.speculation_sets import Chat, chat_set, edit_set, quote_set
from benchmarks.speculation_texts import compare, repeated
from shared.config import DEFAULT_MODEL
from shared.tokenizer import Tokenizer
from trine.prepare import prepare

TOKENS, FEWER_TOKENS, CONTROL_TOKENS = 128, 64, 32
"""The most of an answer."""
TEMPERATURES = (0.7, 1.2)
FROZEN_S = 5.0
FREEZE_AT = 16
"""Tokens of the answer at which the drafter freezes."""
FROZEN = How(max_tokens=192, at_least=192)
AWAKE_S = 2.0
LONG = (5, 6, 2)
"""Of the quote set those with long answers."""
WARM_UP = Chat("Describe in a few sentences how to make a pot of tea, then describe it again for a child.")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. The default takes about ten minutes on two cores."""

    set: int = 8
    """Chats of each set, and of the control without any drafter."""
    sampled: int = 3
    """Chats at each temperature above 0."""
    useless: int = 12
    """Chats with the useless drafter."""
    rounds: int = 4
    """Of 8 chats at once."""
    windows: int = 3
    """In which a drafter is frozen."""


@dataclass(slots=True)
class Found:
    """Results by name, tables of them, and the answers they come from."""

    results: dict[str, float] = field(default_factory=dict)
    rows: dict[str, dict[str, float]] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)

    def add(self, name: str, values: dict[str, float], pairs: Sequence[Pair]) -> None:
        self.rows[name] = values
        self.pairs += pairs


def measure_speculation(tokenizer: Tokenizer, sizes: Sizes = Sizes()) -> dict[str, Any]:
    """Everything with the drafter that the environment asks for (`TRINE_DRAFTER_MODEL` ...), then a useless one."""
    target, found = prepare(DEFAULT_MODEL), Found()
    with stacks() as url, tempfile.TemporaryDirectory() as folder:
        asyncio.run(_control(Sides(url, tokenizer), sizes.set, found))
        with drafter(url, 1, {}) as worker:
            asyncio.run(_with_drafter(Sides(url, tokenizer), worker, sizes, found))
        useless(target, Path(folder))
        with drafter(url, 2, {"TRINE_DRAFT_SOURCE": "model", "TRINE_DRAFTER_MODEL": folder}) as worker:
            asyncio.run(_with_useless(Sides(url, tokenizer), worker, sizes.useless, found))
    texts, partings = compare(tokenizer, target, found.pairs)
    for parting in partings:
        say(f"{parting.pair.how}: {parting.pair.chat.user[:60]!r}: token {parting.index}, margin {parting.margin}")
    rows = found.rows | {"the same texts with and without drafter": texts}
    return {"rows": rows, "texts_parted_not_at_a_tie": texts["parted_not_at_a_tie"]} | found.results


async def _control(sides: Sides, count: int, found: Found) -> None:
    """Two stacks without a drafter are equally fast: what they differ by is what else differs by chance."""
    async with sides:
        await sides.warm_up([WARM_UP])
        pairs = await take_turns(sides, "control", [(c, How(CONTROL_TOKENS)) for c in chat_set()[:count]])
        require(not any(p.drafted.drafted for p in pairs), "somebody drafted who should not be there yet")
        found.add("control: neither has a drafter", row(pairs), pairs)


async def _with_drafter(sides: Sides, worker: Drafter, sizes: Sizes, found: Found) -> None:
    async with sides:
        await sides.warm_up([WARM_UP, edit_set()[-1]])
        await measure_set(sides, "quote", quote_set()[: sizes.set], found)
        await measure_set(sides, "edit", edit_set()[: sizes.set], found)
        before = await sides.guesses(worker)
        await measure_set(sides, "chat", chat_set()[: sizes.set], found)
        require(await sides.guesses(worker) > before, f"{worker.name} was never asked")
        await measure_sampled(sides, sizes.sampled, found)
        await measure_batch(sides, chat_set(), sizes.rounds, found)
        await measure_frozen(sides, worker, [quote_set()[i] for i in LONG][: sizes.windows], found)


async def _with_useless(sides: Sides, worker: Drafter, count: int, found: Found) -> None:
    async with sides:
        await sides.warm_up([WARM_UP])
        before = await sides.guesses(worker)
        chats = [*chat_set(), *quote_set()][:count]
        pairs = await take_turns(sides, "useless drafter", [(chat, How(FEWER_TOKENS)) for chat in chats])
        require(await sides.guesses(worker) > before, f"{worker.name} was never asked")
        found.add("useless drafter, batch 1", row(pairs), pairs)
        found.results["useless_speed"] = row(pairs)["speed_median"]


# One request after the other


async def take_turns(sides: Sides, what: str, asks: Sequence[tuple[Chat, How]]) -> list[Pair]:
    pairs = []
    for number, (chat, how) in enumerate(asks):
        pair = await sides.pair(chat, how, first=(DRAFTED, PLAIN)[number % 2])
        pairs.append(pair)
        drafted, plain = pair.drafted, pair.plain
        say(f"{what} {number}: {drafted.rate:.1f} and {plain.rate:.1f} tokens/s, {pair.speed:.2f}")
    return pairs


def rate(answers: Sequence[Answer]) -> float:
    """Tokens per second of all of them, one after the other."""
    return sum(a.tokens for a in answers) / sum(a.seconds for a in answers)


def drafting(answers: Sequence[Answer]) -> dict[str, float]:
    """What became of drafts. The mean accepted length counts the target's own token of each step, as is usual."""
    drafted, accepted = sum(a.drafted for a in answers), sum(a.accepted for a in answers)
    tokens = sum(a.tokens for a in answers)
    return {
        "drafted_per_token": drafted / tokens,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "mean_accepted_length": tokens / max(tokens - accepted, 1),
        "repeated_8_grams": statistics.mean(repeated(a.token_ids) for a in answers),
    }


def row(pairs: Sequence[Pair]) -> dict[str, float]:
    drafted, plain = [p.drafted for p in pairs], [p.plain for p in pairs]
    return {
        "answers": len(pairs),
        "tokens": statistics.mean(len(a.token_ids) for a in drafted),
        "with_drafter_tokens_per_s": rate(drafted),
        "without_tokens_per_s": rate(plain),
        "speed": rate(drafted) / rate(plain),
        "speed_least": min(p.speed for p in pairs),
        "speed_most": max(p.speed for p in pairs),
        "speed_median": statistics.median(p.speed for p in pairs),
        **drafting(drafted),
    }


async def measure_set(sides: Sides, name: str, chats: Sequence[Chat], found: Found) -> None:
    pairs = await take_turns(sides, name, [(chat, How(TOKENS)) for chat in chats])
    helped = any(p.drafted.accepted and p.drafted.drafters for p in pairs)
    require(helped or name == "chat", f"no draft was accepted in the set {name}")
    found.add(f"{name}, batch 1", row(pairs), pairs)
    found.results[f"{name}_speed"] = row(pairs)["speed"]


async def measure_sampled(sides: Sides, count: int, found: Found) -> None:
    """Some of each set with a temperature and fixed seeds."""
    chats = [chat for chats in zip(quote_set()[5:], edit_set(), chat_set(), strict=False) for chat in chats][:count]
    for temperature in TEMPERATURES:
        asks = [(chat, How(FEWER_TOKENS, temperature, seed)) for seed, chat in enumerate(chats, 11)]
        pairs = await take_turns(sides, f"temperature {temperature}", asks)
        found.add(f"some of each set, temperature {temperature}", row(pairs), pairs)


# Several at once


def batch_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second of answers that came at the same time, once all of them had begun."""
    start, end = max(a.arrivals[0][0] for a in answers), max(a.arrivals[-1][0] for a in answers)
    return sum(a.arrivals[-1][1] - a.there(start)[1] for a in answers) / (end - start)


async def measure_batch(sides: Sides, chats: Sequence[Chat], rounds: int, found: Found) -> None:
    how, pairs = How(FEWER_TOKENS), list[Pair]()
    rates: dict[str, list[float]] = {DRAFTED: [], PLAIN: []}
    for number in range(rounds):
        answers = {}
        for side in (DRAFTED, PLAIN) if number % 2 else (PLAIN, DRAFTED):
            answers[side] = await sides.batch(side, chats, how)
            rates[side].append(batch_rate(answers[side]))
        both = zip(chats, answers[DRAFTED], answers[PLAIN], strict=True)
        pairs += [Pair(chat, how, drafted, plain) for chat, drafted, plain in both]
        say(f"{len(chats)} at once: {rates[DRAFTED][-1]:.1f} and {rates[PLAIN][-1]:.1f} tokens/s")
    speed = statistics.median(some / other for some, other in zip(rates[DRAFTED], rates[PLAIN], strict=True))
    values = {
        "rounds": rounds,
        "with_drafter_tokens_per_s": statistics.median(rates[DRAFTED]),
        "without_tokens_per_s": statistics.median(rates[PLAIN]),
        "speed_median": speed,
        **drafting([p.drafted for p in pairs]),
    }
    found.add(f"chat, batch {len(chats)}", values, pairs)
    found.results["batch_speed"] = speed


# A frozen drafter


def window_speed(drafted: Answer, plain: Answer, frozen_at: float) -> float:
    """How fast the tokens of the frozen seconds came, against the same tokens without a drafter."""
    (start, before), (end, after) = drafted.there(frozen_at), drafted.there(frozen_at + FROZEN_S)
    require(after > before, "no token came while the drafter was frozen")
    require(drafted.arrivals[-1][0] > frozen_at + FROZEN_S, "the answer ended while the drafter was frozen")
    return (plain.had(after) - plain.had(before)) / (end - start)


async def freeze(sides: Sides, worker: Drafter, chat: Chat) -> tuple[Answer, float]:
    """An answer during which the drafter is frozen, and since when."""
    frozen_at: list[float] = []

    def arrived(tokens: int) -> None:
        if tokens >= FREEZE_AT and not frozen_at:
            worker.signal(signal.SIGSTOP)
            frozen_at.append(time.monotonic())
            asyncio.get_running_loop().call_later(FROZEN_S, worker.signal, signal.SIGCONT)

    answer = await sides.answer(DRAFTED, chat, FROZEN, arrived)
    require(bool(frozen_at), "the answer ended before the drafter was frozen")
    require(answer.accepted > 0, "nothing was drafted that freezing could have disturbed")
    await asyncio.sleep(AWAKE_S)
    return answer, frozen_at[0]


async def measure_frozen(sides: Sides, worker: Drafter, chats: Sequence[Chat], found: Found) -> None:
    speeds, pairs = [], []
    for number, chat in enumerate(chats):
        early = await sides.answer(PLAIN, chat, FROZEN) if number % 2 else None
        drafted, frozen_at = await freeze(sides, worker, chat)
        plain = early or await sides.answer(PLAIN, chat, FROZEN)
        speeds.append(window_speed(drafted, plain, frozen_at))
        pairs.append(Pair(chat, FROZEN, drafted, plain))
        say(f"drafter frozen for {FROZEN_S:g} s: {speeds[-1]:.2f}")
    speed = statistics.median(speeds)
    values = {"windows": len(chats), "speed_median": speed, "speed_least": min(speeds)}
    found.add(f"drafter frozen for {FROZEN_S:g} s", values | drafting([p.drafted for p in pairs]), pairs)
    found.results["frozen_speed"] = speed
